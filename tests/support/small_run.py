"""Runs of the small model: its options, its stages, and a recorder of what a run did."""

from dataclasses import dataclass, field
from pathlib import Path

from twofour.pipeline.stages import Silent
from twofour.records.options import Precision, RunOptions

MODEL = f"{Path(__file__).with_name('small_model.py')}:make"
OPTIONS = RunOptions(precision=Precision.FLOAT32)
ALL_STAGES = [
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
    """Remembers which stages were done and which were found done."""

    did: list[str] = field(default_factory=list)
    reused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)

    def done(self, name: str, *, seconds: float, reused: bool) -> None:  # noqa: ARG002  # Protocol
        """Remember."""
        (self.reused if reused else self.did).append(name)

    def note(self, text: str) -> None:
        """Remember."""
        self.notes.append(text)

    def step(self, text: str, done: int, total: int | None) -> None:  # noqa: ARG002  # Protocol
        """Remember."""
        self.steps.append(text)
