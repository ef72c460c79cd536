"""Marks of whole folders: tiers, tests that need a GPU. File systems: small or read-only ones, where root may mount them."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Files of tests/processes and tests/unit that only the tiers --ci and --all run: each takes long, or tests on a larger scale what
# other files test
LONG_FILES = {
    "processes": (
        "test_api.py",
        "test_bad_batches.py",
        "test_bad_rollouts.py",
        "test_broadcast.py",
        "test_broadcast_faults.py",
        "test_broadcast_fleet.py",
        "test_checkpoint.py",
        "test_closed_streams.py",
        "test_debug.py",
        "test_environment.py",
        "test_etcd_access.py",
        "test_etcd_cluster.py",
        "test_etcd_outages.py",
        "test_example_copies.py",
        "test_export.py",
        "test_families.py",
        "test_family_table.py",
        "test_fetching_fleet.py",
        "test_fork_server.py",
        "test_hanging_run.py",
        "test_host_daemon.py",
        "test_launcher.py",
        "test_logprob_reference.py",
        "test_manager_http.py",
        "test_mfcs_on_engines.py",
        "test_mismatch.py",
        "test_parallel_engine.py",
        "test_plan.py",
        "test_plan_command.py",
        "test_rank_processes.py",
        "test_reallocate.py",
        "test_rollout_generation.py",
        "test_routing_by_load.py",
        "test_same_update.py",
        "test_sandbox.py",
        "test_scanner.py",
        "test_self_check.py",
        "test_space.py",
        "test_stacks.py",
        "test_verified_updates.py",
    ),
    "unit": (
        "test_bad_disk.py",
        "test_bad_model_files.py",
        "test_faults.py",
        "test_init.py",
        "test_math_example.py",
        "test_math_reward.py",
        "test_plot.py",
        "test_scripts.py",
        "test_site.py",
        "test_trackers.py",
    ),
}
LAUNCHERS = pytest.StashKey()  # of ForkedLaunchers
# These files have the whole runs of the fast tier, which cover each mode: async; rollout_only and train_only; sync. All other whole
# runs belong to the tiers --ci and --all, and those marked `release` only to --all.
FAST_RUNS = ("test_layouts.py", "test_rollout_then_train.py", "test_mode_sync.py")


def pytest_collection_modifyitems(items):
    has_gpu = Path("/dev/nvidia0").exists()
    for item in items:
        folder, *_, name = item.path.relative_to(TESTS).parts
        if (folder == "end_to_end" and name not in FAST_RUNS) or name in LONG_FILES.get(folder, ()):
            item.add_marker("full")
        if item.get_closest_marker("gpu") and not has_gpu:  # keywords have the names of folders, too
            item.add_marker(pytest.mark.skip(reason="there is no GPU on this machine"))


def pytest_runtest_setup(item):
    """Forks the launchers of runs, unless the test has the mark `real_start`. Called before the fixtures that start runs.
    `asyncrl-launch check`, if a test calls it in this process, checks each architecture once per session."""
    table = sys.modules.get("asyncrl.cli.checks")
    if table is not None:
        from tests.support.remembered_checks import judge_each_architecture_once

        table.judge_architecture = judge_each_architecture_once
    runs = sys.modules.get("asyncrl.testing.runs")  # tests without runs do not import it
    if runs is None:
        return
    if item.config.stash.get(LAUNCHERS, None) is None:
        from tests.support.forked_launchers import ForkedLaunchers

        item.config.stash[LAUNCHERS] = ForkedLaunchers()
    runs.start_launcher = (
        subprocess.Popen if item.get_closest_marker("real_start") else item.config.stash[LAUNCHERS].start
    )


def pytest_unconfigure(config):
    if LAUNCHERS in config.stash:
        config.stash[LAUNCHERS].close()


@pytest.fixture
def mount(tmp_path):
    """mount("size=8m") is a file system of its own, at `folder` if that is given; skips the test where it is not permitted."""
    mounted = []

    def mount_tmpfs(options, folder=None):
        folder = folder or tmp_path / f"disk{len(mounted)}"
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        except OSError as error:
            pytest.skip(f"there is no mount: {error}")
        if done.returncode:
            pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount_tmpfs
    for folder in reversed(mounted):
        subprocess.run(["umount", "--lazy", str(folder)], check=False, timeout=30)


@pytest.fixture
def small_disk(mount):
    """A disk of 8 MiB."""
    return mount("size=8m")


@pytest.fixture
def read_only(mount):
    """A folder that not even root can write to."""
    return mount("ro")
