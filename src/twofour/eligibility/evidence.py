"""What is known of a build beside the model: log, layer information, profile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from twofour.eligibility.nodes import StatedNames
from twofour.records.build import Gpu
from twofour.records.eligibility import EligibilityReport
from twofour.records.export import GraphNode, LayerMap
from twofour.records.log import Build, EngineLayer, LayerInformation, Profile, Tactic, TunedLayer

NO_ENGINE = "no engine"
"""What a report says before anything about an engine is joined with it."""


def engine_words(predicted: EligibilityReport, build: Build | None) -> str:
    """The engine that log or layer information is of.

    A log that states no version leaves the report's own engine, where that is of TensorRT. The GPU
    is named unless the report has it apart.
    """
    known = predicted.engine.startswith("tensorrt")
    if build is None or (build.tensorrt_version is None and known):
        return predicted.engine if known else "tensorrt, version not stated"
    version = build.tensorrt_version
    words = "tensorrt, version not stated" if version is None else f"tensorrt {version}"
    where = "" if gpu_of(predicted, build) is not None else _where(build)
    return f"{words} ({build.producer.value}){where}"


def gpu_of(predicted: EligibilityReport, build: Build | None) -> Gpu | None:
    """The report's GPU, unless the log names another: it is not the engine's then."""
    gpu = predicted.gpu
    if gpu is None or build is None:
        return gpu
    other_name = build.gpu is not None and build.gpu != gpu.name
    capability = build.compute_capability
    other_kind = capability is not None and capability != gpu.compute_capability
    return None if other_name or other_kind else gpu


def _where(build: Build) -> str:
    capability = build.compute_capability
    if build.gpu is None and capability is None:
        return ""
    stated = "not stated" if capability is None else ".".join(map(str, capability))
    return f" on {build.gpu or 'a GPU'} (compute capability {stated})"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildEvidence:
    """Everything there is about one model's engines, as it was read from their files."""

    build: Build | None = None
    """The build with sparse weights allowed."""
    layers: LayerInformation | None = None
    """Of the sparse engine."""
    profile: Profile | None = None
    """Of the sparse engine."""
    dense_build: Build | None = None
    dense_profile: Profile | None = None
    nodes: tuple[GraphNode, ...] = ()
    """Of the ONNX model, in graph order; () where only the predicted report is known."""
    layer_map: LayerMap | None = None
    """Which modules the nodes come from."""
    engine_names: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Names in the engine and the layers or nodes that each holds, as the user says."""
    notes: tuple[str, ...] = ()
    """How the files were read, such as which build of several was taken."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to join."""
        parts = (self.build, self.layers, self.profile, self.dense_build, self.dense_profile)
        return all(part is None for part in parts)


def engine_layers(evidence: BuildEvidence) -> tuple[tuple[EngineLayer, ...] | None, str | None]:
    """The layers of the sparse engine and the file that lists them; None where none does.

    A layer whose kernel is not named gets the one that was timed under the number it states.
    """
    listed = evidence.layers
    build = evidence.build
    in_log = build.engine_layers if build is not None else None
    tuned = _by_name(build.layers if build is not None else ())
    if listed is not None and (listed.detailed or in_log is None):
        return tuple(_with_kernel(layer, tuned) for layer in listed.layers), listed.file
    if in_log is None or build is None:
        return None, None
    return tuple(_with_kernel(layer, tuned) for layer in in_log), build.file


def stated_names(builds: Iterable[Build | None]) -> StatedNames:
    """What logs state of layers that have other names than the nodes of the model."""
    there = [build for build in builds if build is not None]
    renamed = ((r.layer, r.node) for b in there for r in b.renamed_layers)
    sources = ((s.layer, s.onnx_nodes) for b in there for s in b.layer_sources)
    return StatedNames(renamed=tuple(dict.fromkeys(renamed)), sources=tuple(dict.fromkeys(sources)))


def profile_of(evidence: BuildEvidence) -> Profile | None:
    """The profile of the sparse engine: its own file, else the table in the log."""
    if evidence.profile is not None:
        return evidence.profile
    return evidence.build.profile if evidence.build is not None else None


def dense_profile_of(evidence: BuildEvidence) -> Profile | None:
    """The same of the dense engine."""
    if evidence.dense_profile is not None:
        return evidence.dense_profile
    return evidence.dense_build.profile if evidence.dense_build is not None else None


def _by_name(layers: Iterable[TunedLayer]) -> dict[str, TunedLayer]:
    return {layer.name: layer for layer in layers}


def _with_kernel(layer: EngineLayer, tuned: dict[str, TunedLayer]) -> EngineLayer:
    timed = tuned.get(layer.name)
    if layer.kernel is not None or timed is None or layer.tactic_id is None:
        return layer
    tactic = _tactic(timed, layer.tactic_id)
    if tactic is None or tactic.kernel is None:
        return layer
    return replace(layer, kernel=tactic.kernel, sparse=tactic.sparse)


def _tactic(timed: TunedLayer, number: str) -> Tactic | None:
    return next((t for t in timed.tactics if t.id == number and t.kernel is not None), None)
