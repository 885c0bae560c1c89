"""Where one build ends and the next begins."""

from __future__ import annotations

from twofour.logs import facts
from twofour.logs.build import OpenBuild, finished_build, with_complaints
from twofour.logs.layers import Budget
from twofour.logs.prefix import LogicalLine
from twofour.logs.sparsity import RawLine
from twofour.records.log import Build, Producer, SparsityKind

STARTS = (
    "Applying generic optimizations", "ONNX IR version", "Input filename:",
    "Local timing cache in use", "Global timing cache in use", "Building engine with configuration",
    "Adding network input: ", "Original: ", "Constructing optimization profile number 0",
    "RUNNING | Command: ", "Loaded Module: polygraphy",
)  # fmt: skip
"""A builder at work on a network: after a finished build, the next one."""
PERHAPS = "[MemUsageChange] Init CUDA"
"""A builder or a runtime is created: the next build, or the use of the last engine."""
_MOST_HELD = 2000
_A_PAIR = 2
"""What is eligible, and what was chosen."""
ENDS = (
    "Engine generation completed in ", "Finished engine building in ",
    "[MemUsageChange] TensorRT-managed allocation in building engine: ",
    "[MemUsageSnapshot] Builder end: ",
)  # fmt: skip
"""An engine is built. TensorRT 8 says the first as VERBOSE; at INFO the last two tell."""


class Segments:
    """The builds of one source, the last of them open."""

    def __init__(self, file: str, budget: Budget) -> None:
        self.done: list[Build] = []
        self._file = file
        self._budget = budget
        self.build = OpenBuild(file, 1, budget)
        self.held: list[LogicalLine] | None = None
        """Messages since PERHAPS, not yet given to a build."""

    def open(self, line: int) -> OpenBuild:
        """Close the open build and begin another; complaints before a build are of it."""
        if self.build.only_complains:
            return self.build
        self.close()
        self.build = OpenBuild(self._file, line, self._budget)
        return self.build

    def close(self) -> None:
        """Make the open build a record, where anything was found of it."""
        build = self.build
        if build.only_complains and self.done:
            self.done[-1] = with_complaints(self.done[-1], build)
        elif build.touched or build.complained:
            self.done.append(finished_build(build))
        build.touched = build.complained = False

    def banner(self, line: LogicalLine) -> None:
        """Trtexec's RUNNING, PASSED and FAILED lines."""
        message = line.text
        word = message.split(" ", 2)[1] if message.count(" ") > 1 else ""
        if word == "RUNNING":
            build = self.open(line.number)
            build.is_run = build.touched = True
        build = self.build
        if not facts.banner(build.facts, message):
            return
        build.styles[Producer.TRTEXEC] += 1
        build.touched = True
        build.last_line = line.number
        if word != "RUNNING":
            build.finished = True
            build.passed = word == "PASSED"
            build.run_failed = word == "FAILED"

    def starts(self, line: LogicalLine) -> bool:
        """Open a build where the message begins one; whether it did."""
        build = self.build
        over = build.finished or ((build.generated or build.failed) and not build.is_run)
        command = line.text.startswith("RUNNING | Command: ") and build.touched
        if not command and not over:
            return False
        self.open(line.number)
        return True

    def next_fails(self, line: LogicalLine) -> bool:
        """Whether the message is an error of building, and the last build was over already."""
        build = self.build
        if line.severity not in {"E", "F"} or not build.generated or build.is_run:
            return False
        return "Skipping tactic " in line.text[:2000] or build.ends_with(line.text)

    def before_sparsity(self, raw: RawLine) -> OpenBuild:
        """The build a (Sparsity) line belongs to: after the last list of one comes the next."""
        build = self.build
        again = build.native_chosen and not build.is_run and not _lists_the_rest(build, raw)
        if again or build.finished:
            build = self.open(raw.line)
        return build

    def hold(self, line: LogicalLine) -> bool:
        """Keep a message back until it is known whether a build or a runtime has begun."""
        if self.held is None:
            return False
        self.held.append(line)
        return len(self.held) <= _MOST_HELD

    def may_begin(self) -> bool:
        """Whether PERHAPS could be a new build: the last one is over."""
        build = self.build
        return build.generated and not build.is_run and self.held is None


def _lists_the_rest(build: OpenBuild, raw: RawLine) -> bool:
    """Whether the lists of a Myelin region and of the rest stand alone, cut off at `(Sparsity)`.

    `grep -o` takes away what tells them apart; lists that share no name are of one engine.
    """
    if build.styles or build.tuning.layers or build.generated or len(build.sparsity) != _A_PAIR:
        return False
    if raw.printed is None or not raw.names or raw.kind is not SparsityKind.ELIGIBLE:
        return False
    before = {name.strip() for old in build.sparsity for name in (old.names or "").split(", ")}
    return before.isdisjoint(name.strip() for name in raw.names.split(", "))


def notes_end(build: OpenBuild, message: str) -> None:
    """Follow what ends a build, and what shows that it has several profiles."""
    if message.startswith(ENDS):
        build.generated = build.touched = True
        build.tuning.end_combination()
    elif message.startswith("Loaded engine size: "):
        build.loaded = True
    elif message.startswith("Constructing optimization profile number "):
        build.native_chosen = False
