"""Which of the builds in one log a report is about: of this model, with the wanted flag, finished.

A log may hold a dense build beside the sparse one, a build that failed before one that did not,
and builds of other models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from twofour.records.export import GraphNode
from twofour.records.log import Build, BuildOutcome, SparsityFlag
from twofour.reports.join.evidence import stated_names
from twofour.reports.join.node_index import NodeIndex
from twofour.reports.join.resolve import index_nodes, resolve
from twofour.reports.join.sightings import given_names, names_in

_FITS = 0.5
"""Of the best build's share of names that lead to the model: fusions differ between builds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenBuild:
    """A build, and what to say of those beside it."""

    build: Build
    note: str | None
    """Which of how many it is; None where there is one alone."""


def choose_build(
    builds: Sequence[Build], nodes: Sequence[GraphNode], wanted: SparsityFlag
) -> ChosenBuild:
    """The build that tells most of this model; the last of those that tell as much.

    `builds` are of one log and at least one. Without nodes every build may be of the model, and so
    may one that names no layer.
    """
    fitting = _fitting(builds, nodes)
    ranks = [
        (
            fits,
            build.sparsity is wanted,
            not build.made_no_engine,
            build.outcome is not BuildOutcome.LOADED,
            bool(build.sparsity_lines),
            build.outcome is not BuildOutcome.FAILED,
            at,
        )
        for at, (build, fits) in enumerate(zip(builds, fitting, strict=True))
    ]
    at = max(ranks)[-1]
    return ChosenBuild(build=builds[at], note=_note(builds, at))


def _fitting(builds: Sequence[Build], nodes: Sequence[GraphNode]) -> list[bool]:
    if len(builds) < 2 or not nodes:
        return [True] * len(builds)
    names = [name for b in builds for name in _names(b)]
    index = index_nodes(nodes, None, names, stated_names(builds))
    shares = [_share(build, index) for build in builds]
    least = _FITS * max((share for share in shares if share is not None), default=0.0)
    return [share is None or share >= least for share in shares]


def _share(build: Build, index: NodeIndex) -> float | None:
    """How many of the names lead to nodes of the model; None where it names no layer."""
    names = sorted(given_names(_names(build)))
    if not names:
        return None
    return sum(bool(r.nodes or r.region) for r in resolve(names, index)) / len(names)


def _names(build: Build) -> Iterator[str]:
    return names_in(build, build.engine_layers or ())


def _note(builds: Sequence[Build], at: int) -> str | None:
    loaded = [b for b in builds if b.outcome is BuildOutcome.LOADED]
    if len(builds) - len(loaded) < 2:
        return None
    kind = "builds and runs" if loaded else "builds"
    build = builds[at]
    lines = f"lines {build.first_line} to {build.last_line}"
    return f"{build.file} holds {len(builds)} {kind}: number {at + 1} is used ({lines})"
