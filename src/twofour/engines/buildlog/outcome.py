"""How a build ended, and which program wrote its lines."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from twofour.engines.buildlog.prefix import DATED, PLAIN
from twofour.records.log import BuildOutcome, Producer

if TYPE_CHECKING:
    from twofour.engines.buildlog.open_build import OpenBuild

_INSPECTS = re.compile(r"polygraphy(?:\.exe)? inspect ")
_BUILD_FAILED = re.compile(
    r"Could not find any implementation|Engine could not be created|Builder failed"
    r"|buildSerializedNetwork: Error|buildEngine\w*: Error|Building engine failed|Failed to parse"
    r"|Engine set up failed|Could not parse ONNX|Invalid Engine\. Please ensure"
)
_NOT_PARSED = re.compile(r"While parsing node number \d|ModelImporter\.cpp:\d+: ERROR")
"""Errors of the ONNX parser (onnx-tensorrt, ModelImporter.cpp), without which nothing is built."""


def fatal(text: str, *, must_parse: bool) -> bool:
    """Whether an error says that no engine comes of the build.

    `must_parse`: a node that the ONNX parser refuses is one; ONNX Runtime goes on without it.
    """
    text = text[:2000]
    refused = must_parse and _NOT_PARSED.search(text) is not None
    return refused or _BUILD_FAILED.search(text) is not None


def outcome(build: OpenBuild) -> BuildOutcome:
    """As far as the lines show; a finished engine stands above errors of building.

    Inspecting a model asks the parser which nodes it refuses, and that is no failure.
    """
    if build.run_failed:
        return BuildOutcome.FAILED
    if build.generated:
        return BuildOutcome.BUILT
    if _INSPECTS.search(build.facts.command or ""):
        return BuildOutcome.LOADED
    if build.failed:
        return BuildOutcome.FAILED
    if build.loaded or _only_shows(build) or (build.passed and engine_loaded(build)):
        return BuildOutcome.LOADED
    return BuildOutcome.BUILT if build.passed else BuildOutcome.UNFINISHED


def engine_loaded(build: OpenBuild) -> bool:
    """Whether an engine came from a file, or was to, and no builder was at work."""
    return (build.loaded or build.facts.loads_engine) and not _builder_worked(build)


def _only_shows(build: OpenBuild) -> bool:
    """The layers of an engine without any sign of a builder's work."""
    shown = build.inspected or build.listed_layers or build.engine_layers
    return bool(shown) and not build.is_run and not _builder_worked(build)


def _builder_worked(build: OpenBuild) -> bool:
    """Whether any line is one that only a builder prints."""
    signs = (build.generated, build.tuning.layers, build.sparsity, build.fusions)
    return any(map(bool, signs)) or build.facts.cache_mode is not None


def producer(build: OpenBuild) -> Producer:
    """The producer most of the prefixes speak for; a plain `[V]` alone means Python."""
    styles = build.styles
    for certain in (Producer.TENSORRT_LLM, Producer.POLYGRAPHY, Producer.TENSORRT_RTX):
        if styles[certain]:
            return certain
    named = [style for style, _ in styles.most_common() if isinstance(style, Producer)]
    if named:
        return named[0]
    if styles[DATED]:
        return Producer.TRTEXEC
    return Producer.PYTHON if styles[PLAIN] else Producer.UNKNOWN
