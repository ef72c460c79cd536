"""The batch script of a run, and the templates in launcher/slurm, which are generated. tests/slurm tests the scripts with Slurm.

`python tests/unit/test_slurm_script.py` regenerates the templates.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.cli import main as cli
from asyncrl.cli.commands.resume import draft_to_resume
from asyncrl.config.resolve import Facts, resolve
from asyncrl.config.schema import ConfigError
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import run_directory, save_config
from asyncrl.launch.slurm import render
from asyncrl.launch.submission import is_to_submit

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "configs" / "quickstart_cpu.yaml"
PRELUDE = (
    "slurm.prelude='[ ! -e .venv/bin/activate ] || . .venv/bin/activate # or: module load ...; conda activate ...'"
)
TEMPLATES = {
    "single_job.sbatch": (
        ["slurm.nodes=2", "slurm.time_s=1:00:00", PRELUDE],
        (
            "A run on two nodes. From the repository: sbatch launcher/slurm/single_job.sbatch key=value ...",
            "With GPUs: --gres=gpu:8, and an allocation for them. asyncrl-launch run CONFIG cluster=slurm writes such scripts.",
        ),
    ),
    "heterogeneous_job.sbatch": (
        [
            *("slurm.nodes=2", "slurm.time_s=1:00:00", "slurm.partition=gpu", "slurm.gpus_per_node=2", PRELUDE),
            *("slurm.cpu_nodes=2", "slurm.cpu_partition=cpu"),
        ],
        (
            "A run on two nodes of a GPU partition, for training and generation, and two of a CPU partition, for rollout workers.",
            "From the repository: sbatch launcher/slurm/heterogeneous_job.sbatch key=value ...",
        ),
    ),
}


def template(name: str) -> str:
    overrides, title = TEMPLATES[name]
    config = resolve(load_experiment(QUICKSTART, ["cluster=slurm", *overrides]), Facts())
    words = ["configs/quickstart_cpu.yaml", f"checkpoint.on_stop_s={config.checkpoint.on_stop_s:g}"]
    return render(config, words, folder='"$SLURM_SUBMIT_DIR"', program="asyncrl-launch", title=title)


def options(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_up_to_date(name):
    assert (ROOT / "launcher" / "slurm" / name).read_text() == template(name)


@pytest.mark.parametrize("name", TEMPLATES)
def test_scripts_are_valid_bash(name):
    subprocess.run(["bash", "-n"], input=template(name), text=True, check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-"], input=template(name), text=True, check=True)


def test_the_fields_of_the_config_are_in_the_script(tmp_path):
    config = load_experiment(
        QUICKSTART,
        [
            *(
                "cluster=slurm",
                "experiment=big",
                "trial=t7",
                "slurm.nodes=4",
                "slurm.partition=h100",
                "slurm.gpus_per_node=8",
            ),
            *("slurm.cpus_per_node=96", "slurm.memory_per_node=900G", "slurm.time_s=12:00:00", "slurm.account=lab"),
            *("slurm.qos=high", "slurm.options=[--constraint=ib]", "slurm.signal_s=600"),
            *(
                "slurm.srun_options=[--container-image=a.sqsh]",
                "slurm.wrapper=apptainer exec a.sif",
                "slurm.prelude=module load cuda",
            ),
        ],
    )
    script = render(config, ["my run.yaml", "a=b"], folder="/work", program="asyncrl-launch", output="/out/job-%j.out")
    assert options(script) == [
        *(
            "--job-name=big-t7",
            "--output=/out/job-%j.out",
            "--open-mode=append",
            "--time=12:00:00",
            "--account=lab",
            "--qos=high",
        ),
        *(
            "--signal=B:USR1@600",
            "--requeue",
            "--partition=h100",
            "--nodes=4",
            "--ntasks-per-node=1",
            "--cpus-per-task=96",
        ),
        *("--mem=900G", "--gres=gpu:8", "--no-kill", "--constraint=ib"),
    ]
    assert "\nmodule load cuda\n" in script
    assert "run=('my run.yaml' a=b \"$@\" cluster=slurm)" in script
    assert " --no-kill --container-image=a.sqsh \\\n" in script
    assert "\n    apptainer exec a.sif asyncrl-launch host" in script


def test_a_job_gets_whole_nodes_unless_cores_are_named():
    script = render(load_experiment(QUICKSTART, ["cluster=slurm"]), ["c.yaml"], folder="/", program="x")
    assert {"--exclusive", "--mem=0"} <= set(options(script))
    assert not any(
        option.startswith(("--cpus-per-task", "--gres", "--partition", "--time")) for option in options(script)
    )


@pytest.mark.parametrize(("given", "written"), [("90", "0:02:00"), ("24:00:00", "24:00:00"), ("259200", "72:00:00")])
def test_a_time_limit_is_in_seconds_or_hours_minutes_and_seconds(given, written):
    config = load_experiment(QUICKSTART, ["cluster=slurm", f"slurm.time_s={given}"])
    assert f"--time={written}" in options(render(config, ["c.yaml"], folder="/", program="x"))


def test_the_last_checkpoint_may_take_most_of_the_time_after_the_signal():
    config = load_experiment(QUICKSTART, ["cluster=slurm", "slurm.signal_s=600"])
    assert resolve(config, Facts()).checkpoint.on_stop_s == 540
    config = load_experiment(QUICKSTART, ["cluster=slurm", "slurm.signal_s=600", "checkpoint.on_stop_s=0"])
    assert resolve(config, Facts()).checkpoint.on_stop_s == 0


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("slurm.nodes=0", "slurm.nodes=0: must be at least 1"),
        ("slurm.partition='a b'", "slurm.partition='a b': must not have blanks"),
        ("slurm.options=[constraint]", "slurm.options[0]='constraint': write it as on the command line"),
        ("slurm.cpu_partition=cpu", "slurm.cpu_nodes=0: must be at least 1 if other slurm.cpu_... fields are set"),
        ("slurm.signal_s=0", "slurm.signal_s=0.0: must be above 0"),
    ],
)
def test_invalid_slurm_settings_are_refused(override, said):
    with pytest.raises(ConfigError) as refused:
        load_experiment(QUICKSTART, ["cluster=slurm", override])
    assert said in str(refused.value)


def test_dry_run_prints_the_script_and_submits_nothing(capsys, tmp_path):
    assert cli.main(["run", str(QUICKSTART), "cluster=slurm", f"fileroot={tmp_path}", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("#!/bin/bash\n#SBATCH --job-name=sloppy-sorter-t0\n")
    assert f"run=({tmp_path}/sloppy-sorter/t0/slurm/experiment.yaml " in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("before", [["cluster=slurm", "hosts=[n1,n2]"], ["cluster=hosts", "hosts=[a,b]"], []])
def test_a_run_can_be_resumed_as_a_new_job(before, tmp_path):
    """The config that a Slurm attempt saves names the nodes of its job. A new job gets nodes of its own."""
    run_dir = tmp_path / "mine" / "t0"
    save_config(load_experiment(QUICKSTART, before), run_dir / "configs" / "attempt_1" / "experiment.yaml")
    config = draft_to_resume(run_dir, ["cluster=slurm"]).checked()
    assert is_to_submit(config)
    assert (run_directory(config), config.recover) == (run_dir, "required")
    assert is_to_submit(draft_to_resume(run_dir, []).checked()) == ("cluster=slurm" in before)
    assert not draft_to_resume(run_dir, ["cluster=local"]).checked().hosts
    assert draft_to_resume(run_dir, ["cluster=hosts", "hosts=[c]"]).checked().hosts == ["c"]
    if "cluster=hosts" in before:
        assert draft_to_resume(run_dir, []).checked().hosts == ["a", "b"]


if __name__ == "__main__":
    for name in sys.argv[1:] or TEMPLATES:
        (ROOT / "launcher" / "slurm" / name).write_text(template(name))
