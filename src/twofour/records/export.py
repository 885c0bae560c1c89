"""ONNX files and engines: what export and build write, how outputs agree, on which machine."""

from __future__ import annotations

from math import isnan, prod
from typing import ClassVar

from twofour.records import frozen
from twofour.records.options import BuildOptions, Precision, SizeRange, Variant
from twofour.records.weights import SCHEMA_VERSION, Record, Validation


@frozen
class LayerName:
    """Which module and parameter a weight of the ONNX file comes from."""

    layer: str
    parameter: str
    node: str
    initializer: str
    op: str


@frozen
class LayerMap:
    """layers.json: keyed by initializer and node name of the ONNX files beside it."""

    layers: tuple[LayerName, ...]
    schema_version: int = SCHEMA_VERSION


FAR_ERROR = 0.4
"""Relative error above which outputs have too little in common with the dense ones.

An error of no direction that is r times as large as the output leaves a cosine of about 1 - r²/2:
0.4 is one of 0.92, and the outputs of one model in two precisions stay below 0.15.
"""
NEAR_ZERO = 6e-5
"""Outputs whose dense values are all smaller are near zero: float16 keeps few digits of them."""


@frozen
class OutputAgreement:
    """One output of two programs that were given the same inputs."""

    # an overflow is an infinite error, and JSON has no word for it
    __pydantic_config__: ClassVar[dict[str, str]] = {"ser_json_inf_nan": "strings"}

    output: str
    shape: tuple[int, ...]
    max_abs_error: float
    cosine: float
    """Cosine of the whole output, flattened; 1.0 where both are zero everywhere."""
    row_cosine_mean: float
    """Mean over the first axis (the batch) of the cosine of each row."""
    row_cosine_min: float
    """Cosines leave out what is not finite; NaN where nothing is left to compare."""
    not_finite: int = 0
    """Values that are NaN or infinity in one of the two, or in both."""
    dense_not_finite: int = 0
    """Those in the first of the two."""
    bound: float | None = None
    """Largest max_abs_error that is accepted, in units of the output; None: not judged."""
    equal: float | None = None
    """Share of equal values, 0 to 1, of whole numbers, booleans and texts, which have no cosine;
    None for an output of floats."""
    relative_error: float | None = None
    """The norm of the difference over that of the dense output, without what is not finite;
    infinite where only the dense one is zero. None: not known, or `equal` is."""
    dense_largest: float | None = None
    """The largest finite absolute value in the first of the two."""

    @property
    def has_single_values(self) -> bool:
        """Whether each example has one value, whose own cosine is always 1 or -1."""
        return prod(self.shape[1:]) == 1

    @property
    def is_near_zero(self) -> bool:
        """Whether the dense output is so small that its relative error says nothing."""
        return self.dense_largest is not None and self.dense_largest < NEAR_ZERO

    @property
    def judged(self) -> float | None:
        """The relative error where it says something; None for all other outputs."""
        error = self.relative_error
        if error is None or isnan(error) or self.is_near_zero:
            return None
        return error

    @property
    def is_broken(self) -> bool:
        """Whether no value is finite in both."""
        return 0 < self.not_finite == prod(self.shape)

    @property
    def is_far(self) -> bool:
        """Whether the outputs have little in common: pruning lost the function of the model."""
        return self.judged is not None and self.judged > FAR_ERROR

    @property
    def within(self) -> bool:
        """The error is not above its bound."""
        return self.bound is None or self.max_abs_error <= self.bound


@frozen
class OnnxFile:
    """One ONNX file (weights of 2 GiB and more are in `<name>.data` beside it)."""

    variant: Variant
    file: str
    size_bytes: int


@frozen
class ExportedFile(OnnxFile):
    """A file of export.json, and how well it agrees with the module."""

    agreement: tuple[OutputAgreement, ...]
    """ONNX Runtime against the torch module; () where neither can run it here."""
    not_compared: str | None = None


ANONYMOUS = "?"
"""A free dimension without a name: two of them need not be of one size."""


@frozen
class TensorShape:
    """An input or output of an ONNX model; a dimension is a number or a name."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    @property
    def in_words(self) -> str:
        """Name and dimensions: x (batch x 3 x height x width)."""
        return f"{self.name} ({' x '.join(map(str, self.shape)) or 'scalar'})"


@frozen(repr=False)
class ExportedModel(Record):
    """What the dense and the sparse ONNX file of one model have in common."""

    precision: Precision | None
    """None: the model came as ONNX and kept its types."""
    opset: int
    inputs: tuple[TensorShape, ...]
    outputs: tuple[TensorShape, ...]
    ranges: tuple[SizeRange, ...] = ()
    """Ranges of the free sizes besides the batch, by the names in `inputs`."""
    notes: tuple[str, ...] = ()
    """What a change of precision did; why sizes of a module stay fixed."""


@frozen(repr=False)
class ExportResult(ExportedModel):
    """export.json."""

    files: tuple[ExportedFile, ...]
    pattern: Validation
    """The rule applied to sparse.onnx as it was saved."""
    schema_version: int = SCHEMA_VERSION


@frozen
class Metric:
    """One figure of the user's own evaluation, for each variant."""

    name: str
    dense: float
    sparse: float
    unquantized: float | None = None
    """That of the dense model before --quantize."""
    lower_is_better: bool = False
    """A loss, or another figure whose rise is the harm (--lower-is-better)."""

    @property
    def loss(self) -> float:
        """How much worse the sparse model is."""
        return self.sparse - self.dense if self.lower_is_better else self.dense - self.sparse


@frozen
class Accuracy:
    """accuracy.json: what pruning did to the outputs."""

    drift: tuple[OutputAgreement, ...]
    """sparse.onnx against dense.onnx on the example inputs."""
    examples: int
    metrics: tuple[Metric, ...] = ()
    not_compared: str | None = None
    """Why `drift` and `metrics` are empty."""
    no_baseline: str | None = None
    """Why dense.onnx cannot be compared with: its weights were N:M already."""
    by_module: str | None = None
    """Why `drift` compares the torch module in float32 before and after, and not the files."""
    rounding: tuple[OutputAgreement, ...] = ()
    """dense.onnx against the model before --quantize; (): the run does not quantize."""
    pruned_and_rounded: tuple[OutputAgreement, ...] = ()
    """sparse.onnx against the dense model before --quantize, like `rounding`."""
    inputs_are: str | None = None
    """What the example inputs are: "random inputs", "20 built-in example sentences"."""
    held_out: tuple[OutputAgreement, ...] = ()
    """sparse.onnx against the dense model before --quantize, on held-out calibration samples."""
    schema_version: int = SCHEMA_VERSION


STANDARD_DOMAINS = ("", "ai.onnx")
"""Domains of ONNX's own operators; in others the same name may mean anything."""


def qualified_op(op: str, domain: str) -> str:
    """Op type, with its domain unless that is ONNX's own."""
    return op if domain in STANDARD_DOMAINS else f"{domain}::{op}"


@frozen
class GraphNode:
    """One node of an ONNX graph, as far as joining it with an engine needs it."""

    name: str
    """The same as Weight.node: the node's name, or op type and index where it has none."""
    label: str
    """The name, preceded by the subgraphs that it is in."""
    op: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: tuple[str, ...] = ()
    """The `inputs` that are initializers or outputs of Constant nodes."""
    multiply_adds: int | None = None
    """Those of one run of the model at the declared shapes: 0 in the lighter branch of an If.

    None where shapes, or how often a loop runs, are not known, and for other ops.
    """
    unnamed: bool = False
    """The ONNX file gives it no name, so the builder makes one up."""


@frozen
class EngineStatus:
    """Whether an engine can run on this machine, established by trying."""

    engine: str
    version: str | None
    can_run: bool
    why_not: str | None
    hint: str | None = None
    device: str | None = None
    """The device that it runs on: a GPU's name or "CPU"."""
    crashed: bool = False
    """Trying it ended its process."""

    @property
    def in_words(self) -> str:
        """Name, version and device of an engine that can run."""
        return f"{self.engine} {self.version} on {self.device}"


FIRST_WITH_SPARSE = (8, 0)
"""Compute capability from which tensor cores run 2:4 (TensorRT developer guide)."""
WITHOUT_SPARSE_INT8 = (10, 3)
"""Compute capability that cuSPARSELt's table of int8 kernels leaves out between 10.0 and 11.0."""


@frozen
class Gpu:
    """One NVIDIA GPU, as its driver describes it."""

    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int
    driver: str | None

    @property
    def has_sparse_tensor_cores(self) -> bool:
        """Whether it can run 2:4 at all."""
        return self.compute_capability >= FIRST_WITH_SPARSE


@frozen
class LayerTime:
    """Mean time of one engine layer or node over the profiled runs."""

    name: str
    mean_ms: float


@frozen
class FailedTry:
    """A try of an engine that ended its process."""

    doing: str
    """What was tried, such as "loading dense.onnx"."""
    level: str
    """Optimization level: ALL or EXTENDED of ONNX Runtime, default or 0 to 5 of TensorRT."""
    ending: str
    """The signal (SIGSEGV), the exit code, or that there was no sign of life."""


_SPARSE_ONNX = "sparse.onnx"


@frozen
class EngineFiles:
    """The files that the build of one engine writes."""

    variant: Variant
    onnx: str = _SPARSE_ONNX
    """The file it was built from; the dense variant without a dense.onnx is built from sparse.onnx,
    and not allowed sparse kernels."""
    sparse_weights: bool
    """Whether the builder was allowed to use sparse kernels."""
    plan: str | None = None
    log: str | None = None
    layers: str | None = None
    """None: the engine has no layer information, as in old releases of TensorRT."""
    profile: str | None = None

    @property
    def weights(self) -> Variant:
        """The weights that it has, whatever kernels it may use."""
        return Variant.SPARSE if self.onnx == _SPARSE_ONNX else self.variant


@frozen
class VariantBuild(EngineFiles):
    """One engine: what it was built from and the files that were written."""

    onnx: str
    providers: tuple[str, ...] = ()
    """ONNX Runtime: the providers in use, as the session reports them."""
    build_s: float
    size_bytes: int | None = None
    """Size of the plan; None where the engine keeps none."""
    error: str | None = None
    failed_tries: tuple[FailedTry, ...] = ()
    """Tries before this result; with `error`, the last of them is that error."""
    level: str | None = None
    """Optimization level it was built at where that is not the usual one."""


@frozen
class TrtexecVariant(EngineFiles):
    """One engine that trtexec builds elsewhere: its command, and the files that it writes."""

    arguments: tuple[str, ...]
    """Arguments of trtexec, without the program."""
    plan: str
    log: str
    """Standard output and error: build, times and per-layer profile."""
    profile: str


@frozen
class TrtexecRounds:
    """How the script times the engines: `<folder>/<engine>.<round>.json` of each pass."""

    folder: str
    engines: tuple[str, ...]
    """Names of variants; a name with "-again" is the same plan a second time in the round."""
    rounds: int
    arguments: tuple[str, ...]
    """Arguments of trtexec in every pass, without the names of the engine and the file of times."""
    warmup_ms: int
    duration_ms: int


@frozen
class TrtexecFolder:
    """emitted.json: a folder that is built on another machine and reported on here."""

    source: str
    """The ONNX file it was made from, as the user named it."""
    twofour_version: str
    tensorrt: str
    onnx: str
    script: str
    layer_map: str | None
    """A LayerMap from the run folder that the model came from."""
    options: BuildOptions
    """The options that were asked for, with the `shapes` of the commands."""
    variants: tuple[TrtexecVariant, ...]
    rounds: TrtexecRounds
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION


@frozen
class InstalledPackage:
    """One package twofour uses, and what for."""

    name: str
    version: str | None
    needed_for: str
    install: str


@frozen
class Host:
    """A machine, and the Python on it."""

    platform: str
    python_version: str
    gpu: Gpu | None


@frozen(repr=False)
class Diagnosis(Record, Host):
    """What `twofour doctor` finds on this machine."""

    twofour_version: str
    packages: tuple[InstalledPackage, ...]
    engines: tuple[EngineStatus, ...]
    notes: tuple[str, ...] = ()
    """What this GPU, this TensorRT or a package here does not run, with source and date."""
    schema_version: int = SCHEMA_VERSION
