"""Weights: the N:M pattern, why sparse math does not take one, what pruning did, what was saved."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, fields
from enum import Enum
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from twofour.errors import BadInputError
from twofour.records import frozen

if TYPE_CHECKING:
    from pandas import DataFrame

SCHEMA_VERSION = 1
LARGEST_M = 32
LARGEST_PASSED_OVER = 1024
"""Elements; arrays up to this size are not listed: biases, scales, axes of small layers."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """N:M: at most `n` non-zeros in every `m` consecutive weights along the reduction axis."""

    n: int
    m: int

    def __post_init__(self) -> None:
        if not 1 <= self.n < self.m <= LARGEST_M:
            raise BadInputError(
                f"pattern {self.n}:{self.m} is not an N:M pattern",
                hint=f"N:M keeps N of M weights: 1 <= N < M <= {LARGEST_M}, for example 2:4",
            )

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Read "2:4"; raises BadInputError for anything else than two numbers and a colon."""
        match = re.fullmatch(r"\s*(\d{1,9})\s*:\s*(\d{1,9})\s*", text)
        if match is None:
            raise BadInputError(f"{text!r} is not an N:M pattern", hint="write it like 2:4")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"


HARDWARE_PATTERN = Pattern(2, 4)
"""The pattern of sparse tensor cores for 8 and 16 bits (cuSPARSELt, supported data types)."""
"""Longer groups gain less: 8:10 makes the reduction 8/5 as long, and 2:4 halves it at best."""


@dataclass(frozen=True, kw_only=True)
class PatternCheck:
    """What the rule says about one array along one axis (the judge is pattern.py).

    It has no slots because WeightCheck extends LayerWeight too, and Python allows only one base
    class with slots.
    """

    groups_checked: int
    violations: int
    first_violation: tuple[int, ...] | None
    """Index, in C order of the array, of the first element of the first violating group."""

    @property
    def holds(self) -> bool:
        """No group violates the pattern."""
        return self.violations == 0


class ReasonCode(str, Enum):
    """Why a layer does not run sparse, or may not; eligibility/reasons.py says what each means."""

    PATTERN_BROKEN = "PATTERN_BROKEN"
    WRONG_AXIS = "WRONG_AXIS"
    GROUPED_CONV = "GROUPED_CONV"
    DEPTHWISE_CONV = "DEPTHWISE_CONV"
    AXIS_NOT_MULTIPLE = "AXIS_NOT_MULTIPLE"
    SMALL_CHANNELS = "SMALL_CHANNELS"
    NOT_CONSTANT = "NOT_CONSTANT"
    UNSUPPORTED_OP = "UNSUPPORTED_OP"
    DTYPE = "DTYPE"
    INT8_OUTPUT_NOT_QUANTIZED = "INT8_OUTPUT_NOT_QUANTIZED"
    ZERO_POINT = "ZERO_POINT"
    SHARED_WEIGHT = "SHARED_WEIGHT"
    EXCLUDED = "EXCLUDED"
    FROZEN = "FROZEN"
    TOO_SMALL = "TOO_SMALL"
    NOT_A_LAYER = "NOT_A_LAYER"
    GUESSED = "GUESSED"
    DENSE_FASTER = "DENSE_FASTER"
    TACTIC_SKIPPED = "TACTIC_SKIPPED"
    IN_PLUGIN = "IN_PLUGIN"
    GPU_HAS_NO_SPARSE = "GPU_HAS_NO_SPARSE"
    SPARSITY_OFF = "SPARSITY_OFF"
    LOG_SILENT = "LOG_SILENT"
    LOG_CONTRADICTS = "LOG_CONTRADICTS"
    QUALIFIES = "QUALIFIES"
    NOT_EXPORTED = "NOT_EXPORTED"
    PICKED_AT_RUN_TIME = "PICKED_AT_RUN_TIME"
    NOT_CHECKED = "NOT_CHECKED"
    NOT_LISTED = "NOT_LISTED"
    NO_SPARSE_TACTIC = "NO_SPARSE_TACTIC"
    DENSE_TAKEN = "DENSE_TAKEN"
    FUSED_SIBLINGS = "FUSED_SIBLINGS"
    OPERAND_FORM = "OPERAND_FORM"
    ON_DLA = "ON_DLA"
    SPARSITY_FORCED = "SPARSITY_FORCED"
    FOLDED = "FOLDED"


@frozen
class Reason:
    """One reason: its code, a sentence with the numbers of this layer, and its source."""

    code: ReasonCode
    message: str
    source: str | None = None
    """The rule's document, the log line with its number, or None where the message says it all."""


@frozen
class LayerWeight:
    """Which weight of which layer a row is about, in a torch module or in an ONNX graph."""

    layer: str
    """Module path ("encoder.0.fc1"); the ONNX node name where no module is known."""
    node: str | None
    """ONNX node name; None in a torch module."""
    weight: str | None
    """state_dict key, or the name of the ONNX initializer or Constant output; None where the weight
    is computed at run time, or nothing says."""
    op: str
    """ONNX: Conv, ConvTranspose, Gemm, MatMul, Einsum. torch: name of the class, such as Linear."""
    shape: tuple[int, ...]
    """Shape of the array as it is stored."""
    axis: int | None
    """Reduction axis of the stored array; None where it has none."""


@frozen
class WeightedLayer(LayerWeight):
    """A weight and what its layer does: a convolution or a matrix product."""

    groups: int
    in_channels: int
    """C: the whole reduction width, all groups together (1x1 kernel position)."""
    out_channels: int
    """K."""
    kernel: tuple[int, ...]


@frozen
class Weight(WeightedLayer):
    """One weight of a module or graph.

    A layer whose weight is computed at run time has a NOT_CONSTANT reason.
    """

    dtype: str
    math_dtype: str
    """The type that the layer computes in, behind Cast and Quantize/DequantizeLinear."""
    output_quantized: bool | None = None
    """Whether the output of a layer with int8 math is quantised again; None for other math."""
    form: str | None = None
    """ONNX: what it is in its matrix product, unless it is the one matrix on the right."""
    float_on_purpose: bool = False
    """ONNX: an export left it float32, because its values do not fit float16, or its output float
    under --quantize, because rounding that costs accuracy."""
    trace: tuple[str, ...] = ()
    """ONNX: the op types between the node and the constant, from the node's side."""
    tied_to: tuple[str, ...] = ()
    """Other layers (module paths or node names) that use the same stored array."""
    looked_up_by: tuple[str, ...] = ()
    """The ones of `tied_to` that take rows of the array as a table: embeddings, Gather nodes."""
    read_by: tuple[str, ...] = ()
    """ONNX: the ones of `tied_to` that read the array and are no layers: nodes, graph outputs."""
    reasons: tuple[Reason, ...] = ()
    """What the module or graph alone says against sparse math in this layer."""

    @property
    def is_depthwise(self) -> bool:
        """One input channel per group."""
        return self.groups > 1 and self.groups == self.in_channels


@frozen
class NotCovered:
    """Stored arrays of more than 1,024 elements that no row names, by their first consumer."""

    op: str
    """ONNX op type."""
    uses: int
    weights: int
    """Elements of the arrays."""
    multiplies: bool
    """Whether the operator multiplies and sums: these count in every share."""
    users: tuple[str, ...]
    arrays: tuple[str, ...]


_LONGEST_SHOWN = 60


class Record:
    """What a function of twofour returns: short where it is printed, whole as JSON.

    Records need the standard library alone, so what writes them is found by its name when asked.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        """Kind, and the fields other than their defaults; what is long is counted or cut."""
        parts = []
        for one in fields(self):  # type: ignore[arg-type]  # every record is a dataclass
            value = getattr(self, one.name)
            if value != one.default:
                parts.append(f"{one.name}={_brief(value)}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def to_json(self) -> str:
        """The text of its JSON file; NaN and infinity are null."""
        text: str = resolve_name("twofour.store:to_json")(self)
        return text

    def to_dict(self) -> dict[str, Any]:
        """What that text says, in plain values."""
        plain: dict[str, Any] = json.loads(self.to_json())
        return plain


def _brief(value: object) -> str:
    if isinstance(value, (tuple, dict)):
        return f"<items: {len(value)}>"
    text = str(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


class Report(Record):
    """A record that there is a report of: a table in Python, a page in a notebook."""

    __slots__ = ()

    def to_dataframe(self) -> DataFrame:
        """The rows that `--format csv` writes; raises MissingToolError without pandas."""
        frame: DataFrame = resolve_name("twofour.reports:data_frame")(self)
        return frame

    def _repr_html_(self) -> str:
        """The page, in a frame of its own."""
        page: str = resolve_name("twofour.reports:framed_page")(self)
        return page


@frozen(repr=False)
class OfFiles(Report):
    """A record about files of a run folder, and whether these files changed since."""

    stale: tuple[str, ...] = ()
    """Files that changed since the run wrote or read them; they may belong to another model."""


def shared(record: object, kind: type[Any]) -> dict[str, Any]:
    """The fields of `kind` with the record's values, for another record that extends `kind` too."""
    return {field.name: getattr(record, field.name) for field in fields(kind)}


@frozen
class Selection:
    """Which weights are to be pruned; the globs match layer names (fnmatch, case-sensitive)."""

    all_layers: bool = False
    """Prune also what sparse math cannot use, as long as there is an axis to group along."""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    said_by: dict[str, str] = field(default_factory=dict)
    """Glob -> who said it, where it was not the option: a line of a file, the budget."""


@frozen
class OutputError:
    """How far a layer's output moves: ||(W - W')X||^2 / ||WX||^2, 0 for what changes nothing.

    W is the weight that the method aims at, which makes up for what was pruned before.
    """

    calibration: float
    """Error of the saved weights on all calibration samples."""
    held_out: float | None
    """Error on the tenth of the samples that was held out, of a trial without them: some rows, with
    the mask of Wanda, or of a method that is as quick. None: too few to hold out."""

    @property
    def judged(self) -> float:
        """The error that a layer is judged by: on held-out samples, where there are some."""
        return self.calibration if self.held_out is None else self.held_out


@frozen
class Solution:
    """How a weight was pruned with calibration data, or why without."""

    method: str | None = None
    """Which method pruned it; None: left dense."""
    output_error: OutputError | None = None
    """None without calibration data, and for a layer that no calibration input reached."""
    damping: float | None = None
    """Share of the mean diagonal added to the Gram matrix; None where none was used."""
    refit_steps: int = 0
    bias_corrected: bool = False
    note: str | None = None
    """What the user should know about pruning this layer."""


@frozen
class PrunedWeight(Solution):
    """A row of prune.json: one weight, what was done to it, and why not more."""

    weight: Weight
    pruned: bool
    zeros: int
    kept_magnitude: float | None
    """Sum of `|w|` after over sum of `|w|` before, 0 to 1; None where nothing was pruned."""
    reasons: tuple[Reason, ...]
    """Why it was left dense; for a pruned weight, further things that the user should know."""
    held_before: bool = False


@frozen
class Calibration:
    """The calibration samples that the method saw."""

    source: str
    samples: int
    """Number of samples that were used."""
    held_out: int
    """How many of these settings were chosen by; the weights were solved with them too."""
    notes: tuple[str, ...] = ()


@frozen(repr=False)
class PrunedModel(Report):
    """Which model was pruned, to what and how."""

    source: str
    pattern: Pattern
    method: str


@frozen(repr=False)
class PruneResult(PrunedModel):
    """prune.json."""

    selection: Selection
    weights: tuple[PrunedWeight, ...]
    not_covered: tuple[NotCovered, ...] = ()
    """What else the model stores: neither pruned nor judged."""
    calibration: Calibration | None = None
    schema_version: int = SCHEMA_VERSION

    @property
    def pruned_now(self) -> tuple[PrunedWeight, ...]:
        """The rows that were pruned and had not come in the pattern."""
        return tuple(row for row in self.weights if row.pruned and not row.held_before)


@frozen
class WeightCheck(PatternCheck, LayerWeight):
    """A row of validate.json: one weight, read back from a saved file."""

    weight: str
    axis: int
    holds_along: int | None
    """Another axis along which the pattern does hold, looked for only where this one is broken."""
    required: bool
    """Whether this weight was to be pruned: a broken one fails the validation."""
    dtype: str | None = None
    """numpy's name of the stored type; None, as `zeros`, in records of older versions."""
    zeros: int | None = None
    file: str = ""


@frozen(repr=False)
class Validation(OfFiles):
    """validate.json: the rule applied to every weight of the files that were saved."""

    files: tuple[str, ...]
    pattern: Pattern
    checks: tuple[WeightCheck, ...]
    skipped: tuple[Weight, ...] = ()
    """Weights that cannot be checked (not constant, no axis), each with its reasons."""
    not_covered: tuple[NotCovered, ...] = ()
    """What else the files store; () for safetensors, which do not say what uses an array."""
    schema_version: int = SCHEMA_VERSION

    @property
    def broken(self) -> tuple[WeightCheck, ...]:
        """The rows that make the validation fail."""
        return tuple(c for c in self.checks if c.required and c.violations)


@frozen(repr=False)
class LoadedWeights(Record):
    """What `twofour.load_weights` put into a module."""

    path: str
    keys: tuple[str, ...]
    """state_dict keys that were filled: all that the module has."""
    tied: dict[str, str]
    """Keys that share the tensor saved under another one."""
    made_permanent: tuple[str, ...]
    """Weights that the module computed (parametrizations, weight norm, masks), plain ones now."""
