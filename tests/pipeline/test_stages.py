"""A stage runs once, and again only when something it depends on has changed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from support.small_run import Recorder

from twofour.pipeline.folder import open_run_folder
from twofour.pipeline.stages import Runner, Silent, Stage, StageOutput
from twofour.records.weights import Pattern, PruneResult, Selection

RECORD = PruneResult(
    source="m", pattern=Pattern(2, 4), method="magnitude", selection=Selection(), weights=()
)


class Work:
    """Counts its calls and leaves one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.calls = 0

    def __call__(self) -> StageOutput[PruneResult]:
        self.calls += 1
        (self.path / "weights").write_text("w")
        return RECORD, ("weights",)


def _stage(
    work: Callable[[], StageOutput[PruneResult]], reads: tuple[str, ...] = (), seed: int = 1
) -> Stage[PruneResult]:
    return Stage(
        name="prune",
        title="prune",
        record="prune.json",
        kind=PruneResult,
        work=work,
        depends_on=(seed,),
        reads=reads,
    )


def _run(path: Path, stage: Stage[PruneResult]) -> PruneResult:
    with open_run_folder(path, "m") as folder:
        return Runner(folder, Silent(), resume=True).run(stage)


def test_without_resume_a_stage_is_done_once_by_every_run(tmp_path: Path) -> None:
    work = Work(tmp_path)
    for calls in (1, 2):
        with open_run_folder(tmp_path, "m") as folder:
            runner = Runner(folder, Silent())
            assert [runner.run(_stage(work)) for _ in range(2)] == [RECORD] * 2
        assert work.calls == calls


def _never(_record: PruneResult) -> bool:
    return False


def _surely(_record: PruneResult) -> bool:
    return True


def test_a_result_that_does_not_last_is_told_of_and_made_again(tmp_path: Path) -> None:
    work, told = Work(tmp_path), Recorder()
    for lasts in (False, True, True):
        stage = replace(_stage(work), lasting=[_never, _surely][lasts])
        with open_run_folder(tmp_path, "m") as folder:
            Runner(folder, told, resume=True).run(stage)
    assert work.calls == 2
    (note,) = told.notes
    assert note.startswith("prune: memory or space ran out, or a process ended; ")
    assert note.endswith("the same command with --resume tries it again")
