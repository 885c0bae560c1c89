"""What holds for every layer of one engine: its flags, the lists that were printed, the gaps."""

from __future__ import annotations

from dataclasses import dataclass

from twofour.log_records import (
    Build,
    BuildOutcome,
    SparsityFlag,
    SparsityKind,
    SparsityLine,
)
from twofour.records import ReasonCode
from twofour.reports.join.sightings import Sighting, Sightings

FIRST_WITH_SPARSE = (8, 0)
"""Compute capability from which tensor cores run 2:4 (TensorRT developer guide)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """The build, seen from any of its layers."""

    build: Build | None
    seen: Sightings

    @property
    def file(self) -> str:
        """The log's name, for quoting it."""
        return self.build.file if self.build is not None else ""

    @property
    def lines(self) -> tuple[SparsityLine, ...]:
        """The (Sparsity) lines; () without a log."""
        return self.build.sparsity_lines if self.build is not None else ()

    @property
    def forced(self) -> bool:
        """Whether trtexec overwrote the weights."""
        return self.build is not None and self.build.sparsity is SparsityFlag.FORCED

    @property
    def off(self) -> bool:
        """Whether the builder was not allowed to use sparse kernels, and did not."""
        build = self.build
        return build is not None and build.sparsity is SparsityFlag.DISABLED and not self.lines

    @property
    def listing_cut(self) -> bool:
        """Whether the layers of the engine are from a log without an end, which may lack some."""
        build = self.build
        if build is None or build.outcome is not BuildOutcome.UNFINISHED:
            return False
        return self.seen.engine_file == build.file

    @property
    def old_gpu(self) -> bool:
        """Whether the log names a GPU without sparse tensor cores."""
        capability = self.build.compute_capability if self.build is not None else None
        return capability is not None and capability < FIRST_WITH_SPARSE

    @property
    def sparse_weights_seen(self) -> bool:
        """Whether layer information marks any layer's weights as sparse: so they were allowed."""
        return any(layer.has_sparse_weights for layer in self.seen.engine or ())

    def lists(self, kind: SparsityKind, *, foreign: bool) -> tuple[SparsityLine, ...]:
        """The lines of a kind and pass that give their whole list."""
        return tuple(
            line
            for line in self.lines
            if line.kind is kind
            and line.foreign_node is foreign
            and (line.names is not None or line.printed_count == 0)
            and not (line.elided or line.uncertain)
        )

    def counted_as_all(self, sighting: Sighting) -> SparsityLine | None:
        """A chosen line without names whose count says that every eligible layer was chosen."""
        mention = sighting.eligible
        if mention is None:
            return None
        eligible = mention.line
        counts = {len(eligible.names or ()), len(eligible.constituents or ())} - {0}
        return next(
            (
                line
                for line in self.lines
                if line.kind is SparsityKind.CHOSEN
                and line.names is None
                and line.foreign_node is eligible.foreign_node
                and line.printed_count in counts
            ),
            None,
        )


def in_myelin(sighting: Sighting) -> bool:
    """Whether the layer is compiled by Myelin, whose lists are printed apart."""
    if sighting.tuned is not None and sighting.tuned.foreign_node:
        return True
    if sighting.holders:
        return any(is_myelin(holder.name, holder.layer_type) for holder in sighting.holders)
    return sighting.region is not None


def is_myelin(name: str, layer_type: str | None) -> bool:
    """Whether an engine layer is a Myelin region or one of its kernels."""
    known = layer_type in ("Myelin", "kgen", "gemm", "shape_call")
    return known or "{ForeignNode[" in name or "_myl" in name


def silence(circumstances: Circumstances, sighting: Sighting) -> tuple[ReasonCode, str] | None:
    """Why nothing says whether this layer is eligible; None where a whole list leaves it out."""
    build = circumstances.build
    if build is None:
        return ReasonCode.LOG_SILENT, _silent_layers(circumstances)
    if not circumstances.lines:
        return ReasonCode.LOG_SILENT, _silent_log(build)
    foreign = in_myelin(sighting)
    lists = circumstances.lists(SparsityKind.ELIGIBLE, foreign=False)
    if foreign:
        own = circumstances.lists(SparsityKind.ELIGIBLE, foreign=True)
        # TensorRT 8 has no lists of Myelin's own and names what is eligible in the one it prints
        lists = own if own or not is_version_8(build) else lists
    if build.outcome is BuildOutcome.UNFINISHED:
        return ReasonCode.LOG_SILENT, "the log ends before the build does, and has not named it yet"
    if lists and not _cut(circumstances, foreign=foreign):
        return None
    if lists:
        return ReasonCode.LOG_SILENT, "the list of eligible layers is shortened or cannot be split"
    where = "for the Myelin region it lies in" if foreign else "for the layers outside of Myelin"
    return ReasonCode.LOG_SILENT, f"the log has no list of eligible layers {where}"


def is_version_8(build: Build) -> bool:
    """Whether the log was written by TensorRT 8."""
    return (build.tensorrt_version or "").startswith("8.")


def _cut(circumstances: Circumstances, *, foreign: bool) -> bool:
    return any(
        line.kind is SparsityKind.ELIGIBLE
        and line.foreign_node is foreign
        and (line.elided or line.uncertain or (line.names is None and line.printed_count != 0))
        for line in circumstances.lines
    )


def _silent_log(build: Build) -> str:
    if build.outcome is BuildOutcome.UNFINISHED:
        return "the log ends before the build does, without a word about sparsity"
    if build.outcome is BuildOutcome.FAILED and build.build_s is None:
        return "the build failed before it said anything about sparsity"
    if build.outcome is BuildOutcome.LOADED:
        return "the log is of a loaded engine: only the log of its build speaks of sparsity"
    if build.sparsity in (SparsityFlag.ENABLED, SparsityFlag.FORCED):
        return "sparse weights were allowed, and the log has no (Sparsity) line: not verbose enough"
    return "the log has no (Sparsity) line: not verbose enough, or sparse weights were not allowed"


def _silent_layers(circumstances: Circumstances) -> str:
    if circumstances.seen.engine is None:
        return "there is no build log"
    return "layer information alone does not say whether the builder found it eligible"
