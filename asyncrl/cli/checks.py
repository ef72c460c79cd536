"""The table of all checks of a config and a machine. launch/checks/checklist.py has the life of a check.

`run` makes the short checks of files, and plans the run if this machine has GPUs. `check` makes all of them; without a config, and
for a config with problems, those of the machine.
"""

from __future__ import annotations

from asyncrl.cli.architecture_check import judge_architecture
from asyncrl.cli.attention_check import judge_attention
from asyncrl.cli.doctor import MACHINE_CHECKS
from asyncrl.cli.planning import check_plan
from asyncrl.cli.task_trial import judge_step, try_tasks
from asyncrl.launch.checks import preflight
from asyncrl.launch.checks.checklist import MODEL, PROMPTS, TASKS, TOKENIZER, WEIGHTS, Check, Cost, Place

# In the order of their lines
CHECKS = (
    *preflight.CHECKS,
    Check(
        "the tasks' code",
        lambda case: try_tasks(case.config),
        reads=("rollout", "prompts"),
        needs=(PROMPTS, TASKS),
        when=lambda config: not config.prompts.chat_template,
        place="tasks",
        cost="trial",
    ),
    Check(
        "the tasks' code",
        lambda case: try_tasks(case.config),
        reads=("rollout", "prompts"),
        needs=(PROMPTS, TASKS, TOKENIZER),
        when=lambda config: config.prompts.chat_template,
        place="tasks",
        cost="trial",
    ),
    Check("train.step", lambda case: judge_step(case.config), reads=("train.step",), place="tasks", cost="trial"),
    Check(
        "a small copy of the model",
        lambda case: judge_architecture(case.config),
        reads=("model_path", "allocation", "mode", "generation"),
        needs=(WEIGHTS,),
        place="tasks",
        cost="trial",
    ),
    Check(
        "attention of the trainer",
        judge_attention,
        reads=("train", "mode"),
        needs=(MODEL,),
        place="tasks",
        cost="trial",
    ),
    *MACHINE_CHECKS,
    Check("plan", check_plan, when=lambda config: bool(config.model_path), place="machine", cost="plan"),
)


def checks_of(*places: Place, cost: Cost | None = None) -> list[Check]:
    """The checks of these places, and of this cost if one is given."""
    return [check for check in CHECKS if check.place in places and cost in (None, check.cost)]
