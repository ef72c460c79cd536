"""A real Slurm cluster for these tests, and the smallest run to submit to it."""

import os
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, missing_programs

from asyncrl.testing.runs import make_tiny_run


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """Four nodes, shared by all tests of the session. SLURM_CONF names the cluster."""
    if missing := missing_programs():
        pytest.fail(f"tests/slurm need {', '.join(missing)}: bash launcher/setup_slurm.sh installs them", pytrace=False)
    if os.geteuid() != 0:
        pytest.skip("nodes are network namespaces, which only root may make")
    with (
        SlurmCluster(Path(tmp_path_factory.mktemp("slurm")) / "cluster") as made,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name in ("SLURM_CONF", "ASYNCRL_SIMULATED_GPUS"):
            patch.setenv(name, made.env[name])
        yield made


@pytest.fixture(autouse=True)
def _quiet_nodes(cluster):
    """Cancel all jobs after each test, and wait until no process is left on the nodes."""
    yield
    cluster.end_all_jobs()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The config of the smallest run."""
    return make_tiny_run(tmp_path_factory.mktemp("tiny"))
