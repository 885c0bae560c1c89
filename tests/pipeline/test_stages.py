"""A stage runs once, and again only when something it depends on has changed."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from twofour.pipeline.folder import open_run_folder
from twofour.pipeline.stages import Runner, Silent, Stage
from twofour.records.options import Selection
from twofour.records.pruning import PruneResult
from twofour.records.weights import Pattern

RECORD = PruneResult(
    source="m", pattern=Pattern(2, 4), method="magnitude", selection=Selection(), weights=()
)


def _stage(option: int = 1, reads: tuple[str, ...] = ()) -> Stage:
    return Stage(
        name="prune", title="prune", record="prune.json", depends={"o": option}, reads=reads
    )


class Work:
    """Counts its calls and leaves one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.calls = 0

    def __call__(self) -> tuple[PruneResult, Sequence[str]]:
        self.calls += 1
        (self.path / "weights").write_text("w")
        return RECORD, ("weights",)


def _run(path: Path, stage: Stage, work: Work) -> PruneResult:
    with open_run_folder(path, "m") as folder:
        return Runner(folder, Silent()).run(stage, PruneResult, work)


def test_a_stage_that_is_done_is_not_done_again(tmp_path: Path) -> None:
    work = Work(tmp_path)
    assert [_run(tmp_path, _stage(), work) for _ in range(3)] == [RECORD] * 3
    assert work.calls == 1


def _change_option(_: Path) -> Stage:
    return _stage(option=2)


def _delete_output(path: Path) -> Stage:
    (path / "weights").unlink()
    return _stage()


def _damage_output(path: Path) -> Stage:
    (path / "weights").write_text("v")
    return _stage()


def _delete_record(path: Path) -> Stage:
    (path / "prune.json").unlink()
    return _stage()


@pytest.mark.parametrize("change", [_change_option, _delete_output, _damage_output, _delete_record])
def test_a_stage_is_done_again_when_something_changed(
    tmp_path: Path, change: Callable[[Path], Stage]
) -> None:
    work = Work(tmp_path)
    _run(tmp_path, _stage(), work)
    assert _run(tmp_path, change(tmp_path), work) == RECORD
    assert work.calls == 2


def test_a_stage_is_done_again_when_a_file_it_reads_changed(tmp_path: Path) -> None:
    work = Work(tmp_path)
    with open_run_folder(tmp_path, "m"):
        pass
    (tmp_path / "dense.onnx").write_text("1")
    _run(tmp_path, _stage(reads=("dense.onnx",)), work)
    _run(tmp_path, _stage(reads=("dense.onnx",)), work)
    assert work.calls == 1
    (tmp_path / "dense.onnx").write_text("2")
    _run(tmp_path, _stage(reads=("dense.onnx",)), work)
    assert work.calls == 2


def test_a_stage_that_fails_is_not_noted_as_done(tmp_path: Path) -> None:
    def fail() -> tuple[PruneResult, Sequence[str]]:
        raise RuntimeError

    with open_run_folder(tmp_path, "m") as folder, pytest.raises(RuntimeError):
        Runner(folder, Silent()).run(_stage(), PruneResult, fail)
    with open_run_folder(tmp_path, "m") as folder:
        assert folder.stage("prune") is None
