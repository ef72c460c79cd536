"""Names and paths of folders in a run: a name or path that leads out of the run is refused."""

from pathlib import Path

import pytest

from asyncrl.protocol.run_folder import OutsideRunError, name_of, path_of


def test_a_name_is_translated_to_its_path_and_back(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    path = path_of(run_dir, "weights/actor/a0001-v00000003")  # the folder need not exist
    assert path == run_dir / "weights" / "actor" / "a0001-v00000003"
    assert name_of(run_dir, path) == "weights/actor/a0001-v00000003"
    assert name_of(str(run_dir), path) == "weights/actor/a0001-v00000003"


@pytest.mark.parametrize("name", ["", ".", "/etc", "..", "../other", "weights/../../other", "a/..", "//x", "a\0b"])
def test_a_name_outside_the_run_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(OutsideRunError, match="is no folder of the run"):
        path_of(tmp_path, name)


def test_a_path_outside_has_no_name(tmp_path: Path) -> None:
    with pytest.raises(OutsideRunError, match="is not in the run's folder"):
        name_of(tmp_path / "run", tmp_path / "other")
    with pytest.raises(OutsideRunError, match="is no folder of the run"):
        name_of(tmp_path / "run", tmp_path / "run" / ".." / "other")


def test_symbolic_links_that_leave_the_run_are_refused(tmp_path: Path) -> None:
    run_dir, other = tmp_path / "run", tmp_path / "other"
    run_dir.mkdir()
    (other / "inside").mkdir(parents=True)
    (run_dir / "weights").symlink_to(other)
    (run_dir / "dangling").symlink_to(other / "not there")
    for name in ("weights", "weights/inside", "weights/new", "dangling", "dangling/new"):
        with pytest.raises(OutsideRunError, match="is a symbolic link, or a symbolic link in it leads out of"):
            path_of(run_dir, name)
    with pytest.raises(OutsideRunError, match="is a symbolic link, or a symbolic link in it leads out of"):
        name_of(run_dir, run_dir / "weights" / "inside")


def test_the_runs_folder_may_be_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "real")
    assert path_of(tmp_path / "run", "checkpoints/final") == tmp_path / "run" / "checkpoints" / "final"
