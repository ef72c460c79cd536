"""Try the user's code of rollout.tasks for `asyncrl-launch check`: import agents and environments, call each reward once.

User code runs in judge processes, as with rollout.reward_isolation=process, with the time limit rollout.reward_timeout_s and the
memory limit rollout.reward_memory_bytes. It cannot end or block `check`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import asyncrl
from asyncrl.config.modes import mode_of
from asyncrl.config.schema import ConfigError, ExperimentConfig, RolloutConfig, TaskConfig
from asyncrl.config.validation import problems_of_generating_step
from asyncrl.data.prompts import Prompt, PromptError, PromptSource, load_tokenizer
from asyncrl.launch.checks.bound_names import takes_prompts
from asyncrl.launch.checks.checklist import Finding
from asyncrl.master.step_function import StepFunction
from asyncrl.protocol.trajectories import Locator
from asyncrl.rewards.judges import Call, JudgeDied, Judges, JudgesLost
from asyncrl.rewards.reward import Completion, call_arguments

_CLASS_CHECK = "asyncrl.rollout.rollouts:check_class"
_VERIFIERS, _EPISODE = "verifiers:", "asyncrl.rollout.verifiers_episode:play"
_FRAME = re.compile(r'^ +File "(.+)", line (\d+).*$', re.MULTILINE)
_NOT_THE_USERS = tuple(
    str(folder)
    for folder in (
        Path(asyncrl.__file__).parent,
        *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)
_STDERR = 2  # file descriptor for the output of the user's code, because stdout may carry only JSON
_MAX_REFUSED = 100  # prompts of a task that are tried if they cannot be rendered
_SHOWN = 60  # characters of a prompt or a response
_LOGGER = logging.getLogger(__name__)


class _TrialFailed(Exception):
    """The user's code cannot be used; the message gives the reason."""


def try_tasks(config: ExperimentConfig) -> list[Finding]:
    """One finding per task. waits for: the user's code, within the limits of the run."""
    if mode_of(config.mode).replays:  # there is nothing to judge
        return []
    prompts = _first_prompts(config)
    return [
        asyncio.run(_try_task(name, task, config.rollout, prompts.get(name)))
        for name, task in sorted(config.rollout.tasks.items())
    ]


def judge_step(config: ExperimentConfig) -> list[Finding]:
    """A finding about train.step, which is imported and not called; none for the shipped step."""
    spec = config.train.step
    if not spec:
        return []
    try:
        function = StepFunction(spec, config.train.call_timeout_s)
    except Exception as error:  # the user's module may raise any exception
        return [Finding("train.step", "fail", f"{type(error).__name__}: {error}", "correct the file or the name")]
    eta, overdue = config.manager.max_head_offpolicyness, config.manager.overdue
    found = []
    if function.generates and not takes_prompts(spec):  # the checks of files name the problems of a file's step
        problems = problems_of_generating_step(config.mode, config.train, eta, overdue)
        found = [Finding(name, "fail", str(value), remedy) for name, value, remedy in problems]
    return found or [Finding("train.step", "ok", f"{spec} is a step function")]


async def _try_task(
    name: str, task: TaskConfig, rollout: RolloutConfig, prompt: Prompt | PromptError | None
) -> Finding:
    if isinstance(prompt, PromptError):
        problem = f"none of its first prompts can be used: {prompt}"
        return Finding(f"rollout.tasks.{name}", "fail", problem, "correct the prompts, or use another tokenizer")
    results = []
    for kind, spec, arguments in (("agent", task.agent, task.agent_args), ("env", task.env, task.env_args)):
        if not spec and not arguments:
            continue
        try:
            await _ask(_CLASS_CHECK, rollout, partial(_class_call, f"rollout.tasks.{name}", task, kind))
            if kind == "agent" and spec.startswith(_VERIFIERS):
                await _ask(_EPISODE, rollout, partial(_empty_episode, task), str(arguments.get("python", "")))
        except _TrialFailed as error:
            return _failed(f"rollout.tasks.{name}.{kind}", spec or f"the default {kind}", error)
        if spec:
            results.append(f"{kind} {spec} can be imported")
    if task.reward and prompt is not None:
        text = str(prompt.answer) if isinstance(prompt.answer, str | int | float) else ""
        response = f"its answer {text[:_SHOWN]!r}" if text else "nothing"
        try:
            completion = Completion(text, finished=True)
            value = await _ask(task.reward, rollout, partial(call_arguments, prompt, completion))
        except _TrialFailed as error:
            finding = _failed(f"rollout.tasks.{name}.reward", task.reward, error)
            # With threads, the reward function may need something that an agent prepares in the memory of the rollout worker
            if rollout.reward_isolation == "thread":
                remedy = "fix it, unless it needs the rollout worker's memory (rollout.reward_isolation=thread)"
                return replace(finding, state="warn", remedy=remedy)
            return finding
        results.append(f"{task.reward} gives {value:g} if the response to {prompt.plain_text[:_SHOWN]!r} is {response}")
    elif task.reward:
        results.append(f"{task.reward} was not called: no training prompt belongs to this task")
    return Finding(f"task {name}", "ok", "; ".join(results))


def _failed(field: str, spec: str, error: _TrialFailed) -> Finding:
    return Finding(field, "fail", f"{spec} {error}", "fix it, and run the check again")


async def _ask(spec: str, rollout: RolloutConfig, call: Callable[[Sequence[str]], Call], python: str = "") -> float:
    """Call the function named by spec once in a judge process, and return its number. Raises _TrialFailed if the call fails.

    call: makes the arguments of that call from the names of the optional arguments that the function takes. python: the interpreter
    of the process; "": this one.
    """
    try:
        judges = Judges(
            spec,
            memory_bytes=rollout.reward_memory_bytes,
            most=1,
            most_async=1,
            logger=_LOGGER,
            python=python,
            output=_STDERR,
        )
    except ConfigError as error:
        raise _TrialFailed(f"cannot be imported: {user_error(str(error))}") from error
    try:
        answer = await judges.ask([call(judges.arguments)], rollout.reward_timeout_s)
    except TimeoutError:
        limit = f"rollout.reward_timeout_s={rollout.reward_timeout_s:g}"
        raise _TrialFailed(f"took more than {rollout.reward_timeout_s:g} s ({limit})") from None
    except JudgeDied as error:
        raise _TrialFailed(f"ended its process: {error}") from None
    except JudgesLost as error:
        raise _TrialFailed(f"cannot be called: {error}") from None
    finally:
        judges.close()
    if "values" in answer:
        return float(answer["values"][0])
    if "no_number" in answer:
        raise _TrialFailed(f"returned {answer['no_number']}; it must be a finite number")
    raise _TrialFailed(f"raised {user_error(answer['traceback'])}")


def _class_call(field: str, task: TaskConfig, kind: str, _taken: Sequence[str]) -> Call:
    return (field, asdict(task), kind), {}


def _empty_episode(task: TaskConfig, _taken: Sequence[str]) -> Call:
    """Without an address it only makes the environment."""
    settings = {"environment": task.agent.removeprefix(_VERIFIERS), "config": task.agent_args.get("config") or {}}
    return (settings, {}, {}), {}


def user_error(text: str) -> str:
    """Shorten a traceback to its error and the user's own line: `ValueError: no digits (reward.py:12)`. Keep other text."""
    frames = list(_FRAME.finditer(text))
    if not frames:
        return text
    behind = text[frames[-1].end() :].splitlines()
    error = next((at for at, line in enumerate(behind) if line and not line.startswith(" ")), 0)
    theirs = [frame for frame in frames if not frame[1].startswith(("<", *_NOT_THE_USERS))]
    place = (theirs or frames)[-1]
    return f"{' '.join(behind[error:]).strip()} ({place[1]}:{place[2]})"


def _first_prompts(config: ExperimentConfig) -> Mapping[str, Prompt | PromptError]:
    """The first training prompt of each task that can be rendered; if none of its first ones can, the error of one of them."""
    path = config.tokenizer_path or config.model_path
    is_known = config.prompts.chat_template or (Path(path).expanduser() / "tokenizer.json").is_file()
    tokenizer = load_tokenizer(path) if is_known else None  # it knows the special tokens, which rewards do not receive
    source = PromptSource(config.prompts, tokenizer, config.seed)
    found = dict[str, Prompt | PromptError]()
    tries = dict.fromkeys(source.tasks, 0)
    for locator in (Locator(0, position) for position in range(len(source))):
        task = source.task_of(locator)
        if tries[task] == _MAX_REFUSED:
            continue
        try:
            found[task], tries[task] = source.get(locator), _MAX_REFUSED
        except PromptError as error:  # a run rejects such a prompt
            found[task] = error
            tries[task] += 1
        if min(tries.values()) == _MAX_REFUSED:
            break
    return found
