"""Runs of the small model: its options, its stages, and a recorder of what a run did."""

from dataclasses import dataclass, field
from pathlib import Path

from twofour.pipeline.stages import Silent
from twofour.records.options import Precision, RunOptions

MODEL = f"{Path(__file__).with_name('small_model.py')}:make"
OPTIONS = RunOptions(precision=Precision.FLOAT32)
ALL_STAGES = [
    "graph",
    "export-dense",
    "prune",
    "validate",
    "export-sparse",
    "check-dense",
    "build-dense",
    "check-sparse",
    "build-sparse",
    "export",
    "accuracy",
    "times",
    "build",
    "report",
]


@dataclass
class Recorder(Silent):
    """Remembers which stages were done and which were kept."""

    did: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)

    def done(self, name: str, *, seconds: float) -> None:  # noqa: ARG002  # Protocol
        self.did.append(name)

    def note(self, text: str) -> None:
        if text.startswith("kept: "):
            self.kept += text.removeprefix("kept: ").split(", ")
        else:
            self.notes.append(text)

    def step(self, text: str, done: int, total: int | None) -> None:  # noqa: ARG002  # Protocol
        self.steps.append(text)
