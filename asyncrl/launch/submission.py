"""`asyncrl-launch run CONFIG cluster=slurm` on the login node: writes the job's script, submits it, and shows the job's output."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

from asyncrl.config.resolve import with_absolute_paths
from asyncrl.config.schema import ExperimentConfig
from asyncrl.launch.program import run_directory, save_config
from asyncrl.launch.rundir import EXPERIMENT_FILE, LaunchError, RunBusyError, holder, is_running
from asyncrl.launch.slurm import (
    JobRecord,
    JobState,
    job_state,
    read_job,
    render,
    slurm_dir,
    submit,
    write_job,
)
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock
from asyncrl.runtime.disk import writing
from asyncrl.runtime.process import python_module

_TURN_S = 0.5
_ASK_S = 2.0  # between two queries to Slurm
_UNANSWERED_S = 600.0  # give up if Slurm has not answered for this long; enough for its restart
_READ_BYTES = 1 << 20


def is_to_submit(config: ExperimentConfig) -> bool:
    """Whether the config must be submitted as a Slurm job. Inside the job, `hosts` names the job's nodes."""
    return config.cluster == "slurm" and not config.hosts


def job_script(config: ExperimentConfig) -> str:
    """Return the batch script that `submit_job` submits."""
    run_dir = run_directory(config)
    program = "asyncrl-launch" if shutil.which("asyncrl-launch") else shlex.join(python_module("asyncrl.cli.main"))
    words = [str(slurm_dir(run_dir) / EXPERIMENT_FILE)]
    output = str(slurm_dir(run_dir) / "job-%j.out")
    return render(config, words, folder=shlex.quote(str(Path.cwd())), program=program, output=output)


def submit_job(config: ExperimentConfig) -> JobRecord:
    """Submit the run as a job. Raises RunBusyError if another job or a launcher uses the run's folder."""
    run_dir = run_directory(config)
    before = read_job(run_dir)
    if before is not None and not job_state(before.job_id).ended:
        raise RunBusyError(
            f"job {before.job_id} is {job_state(before.job_id).state} and uses {run_dir}; end it with "
            f"`asyncrl-launch stop {run_dir}`, or choose another trial=..."
        )
    if is_running(run_dir):
        raise RunBusyError(f"{run_dir} is in use by process {holder(run_dir)}; choose another trial=...")
    folder = slurm_dir(run_dir)
    script = folder / "job.sbatch"
    with writing(script):
        folder.mkdir(parents=True, exist_ok=True)
        script.write_text(job_script(config))
    save_config(with_absolute_paths(config), folder / EXPERIMENT_FILE)
    job_id = submit(script)
    record = JobRecord(job_id=job_id, script=str(script), output=str(folder / f"job-{job_id}.out"))
    write_job(run_dir, record)
    return record


def follow(
    record: JobRecord, write: Callable[[str], object], say: Callable[[str], object], clock: Clock = SYSTEM_CLOCK
) -> int:
    """Show a job's output until the job has ended. Returns its exit code. Continues to follow a job that is requeued.

    Waits for: the job's end, within the time limit that Slurm sets. Raises LaunchError if Slurm does not answer for _UNANSWERED_S.
    Unblocked by: the job's end; Ctrl-C.
    """
    offset, shown, answered, next_question = 0, "", clock.monotonic(), 0.0
    while True:
        ended: JobState | None = None
        if clock.monotonic() >= next_question:
            next_question = clock.monotonic() + _ASK_S
            try:
                state = job_state(record.job_id)
                answered = clock.monotonic()
            except LaunchError:
                if clock.monotonic() - answered > _UNANSWERED_S:
                    raise
                continue
            text = state.state + (f" ({state.reason})" if state.reason not in ("", "None") else "")
            if text != shown:
                shown = text
                say(f"job {record.job_id}: {text}")
            ended = state if state.ended else None
        offset = _copy(Path(record.output), offset, write)
        if ended is not None:
            return ended.exit_code if ended.exit_code is not None else 1
        clock.sleep(_TURN_S)


def _copy(path: Path, offset: int, write: Callable[[str], object]) -> int:
    """Write the bytes that a file has beyond offset, at most _READ_BYTES. Returns the new offset."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= offset:
                return offset
            file.seek(offset)
            data = file.read(_READ_BYTES)
    except OSError:  # the file does not exist yet
        return offset
    write(data.decode(errors="replace"))
    return offset + len(data)
