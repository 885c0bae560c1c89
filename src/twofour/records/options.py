"""Options: everything that a user chooses."""

from __future__ import annotations

from dataclasses import field
from enum import Enum
from math import inf
from pathlib import Path

from twofour.errors import BadInputError
from twofour.records import frozen
from twofour.records.weights import HARDWARE_PATTERN, Pattern, Selection

LARGEST_SEED = 2**63 - 1
"""The largest seed that numpy, torch and JSON all accept."""


LARGEST_SIZE = 2**31 - 1
"""The largest batch or other dimension: TensorRT before 10 counts in 32 bits."""


class Variant(str, Enum):
    """The models of one run, each an ONNX file and an engine."""

    DENSE = "dense"
    """The unchanged model; as an engine, built without sparse kernels."""
    SPARSE = "sparse"
    PRUNED = "pruned"
    """The pruned model where --quantize makes another file of it."""
    FLOAT = "float"
    """The unchanged model before --quantize."""
    TUNED = "tuned"
    """The unchanged model where another one is the dense model (--dense-reference)."""

    __str__ = str.__str__


class Precision(str, Enum):
    """Type of weights and arithmetic in the ONNX graph; strongly typed builds keep it."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @classmethod
    def _missing_(cls, value: object) -> Precision | None:
        """Other words for the same: fp16, half, bf16, fp32, float."""
        known = _PRECISION_WORDS.get(str(value).strip().lower())
        return None if known is None else cls(known)


_PRECISION_WORDS = {
    **dict.fromkeys(("float32", "fp32", "f32", "float", "single", "full"), "float32"),
    **dict.fromkeys(("float16", "fp16", "f16", "half"), "float16"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
}


@frozen
class DynamicAxis:
    """An axis of an input whose size stays free in the file; one name is one size."""

    input: str
    axis: int
    name: str


@frozen
class SizeRange:
    """What a free size of an ONNX file may be: from the module, written into the file."""

    name: str
    min: int
    max: int | None


@frozen
class ExportOptions:
    """How a torch module becomes an ONNX file; the same for the dense and the sparse one."""

    precision: Precision = Precision.FLOAT32
    float32_nodes: tuple[str, ...] = ()
    """Globs of nodes that keep float32."""
    opset: int | None = None
    """None: what torch takes by default, and 22 for bfloat16."""
    dynamic_batch: bool = True
    """Axis 0 of every input that has the batch there is the dimension `batch`."""
    dynamic: tuple[DynamicAxis, ...] = ()
    """Further axes whose size stays free."""
    ranges: tuple[SizeRange, ...] = ()
    """Known ranges of the free sizes: written into the file, and passed to torch.export."""
    input_names: tuple[str, ...] | None = None


@frozen
class ShapeProfile:
    """Smallest, usual and largest shape of one input (a TensorRT optimization profile)."""

    input: str
    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


class Quantization(str, Enum):
    """Type that --quantize rounds products to."""

    INT8 = "int8"


class AllowedType(str, Enum):
    """What a weakly typed builder (TensorRT before 11) may run float32 layers in."""

    FP16 = "fp16"
    INT8 = "int8"
    BF16 = "bf16"


@frozen
class BuildOptions:
    """Options that the dense and the sparse build share."""

    shapes: tuple[ShapeProfile, ...] = ()
    workspace_bytes: int | None = None
    optimization_level: int | None = None
    tf32: bool = True
    allow: tuple[AllowedType, ...] = ()
    """Not empty: the network is weakly typed, even where this TensorRT has strong typing."""
    iterations: int = 10
    warmup: int = 2
    threads: int | None = None
    """ONNX Runtime on the CPU: threads inside an operator; None: every core of this process."""


@frozen
class ExampleInputs:
    """The inputs that a model is run on."""

    inputs: str | None = None
    """Path of the example inputs: .npz, or .txt for a text model."""
    input_shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of random example inputs, by position, or by the names beside them."""
    input_shape_names: tuple[str, ...] = ()
    """Names of the inputs, one for each of `input_shapes`; (): by position."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.inputs is not None and self.input_shapes:
            raise BadInputError(
                "--inputs and --input-shape cannot be given together", hint="leave one of them out"
            )
        # a seed of another type is reported where all fields are checked
        if isinstance(self.seed, int) and not 0 <= self.seed <= LARGEST_SEED:
            raise BadInputError(
                f"--seed {self.seed} is not a possible seed",
                hint=f"give one from 0 to {LARGEST_SEED}",
            )

    @property
    def file(self) -> Path | None:
        """The path in `inputs`."""
        return None if self.inputs is None else Path(self.inputs)


@frozen
class CalibrationOptions:
    """The data that pruning sees, and how much of it."""

    data: str | None = None
    """What the user named: a file, a folder of images, file.py:callable; None: no data."""
    samples: int = 1024
    """At most this many are used: the first ones, of a folder images all over it."""
    image_mean: tuple[float, ...] = ()
    """Mean of each channel, on the scale 0 to 1; (): the model's own preprocessing."""
    image_std: tuple[float, ...] = ()
    image_size: tuple[int, int] | None = None
    option: str = field(default="--calibrate", repr=False)
    """The option that named the data, for errors."""


@frozen
class MethodOptions:
    """How the weights that stay are chosen, and what becomes of them."""

    name: str | None = None
    """None: magnitude without calibration data, admm with it."""
    refit: int | None = None
    """Conjugate-gradient steps on the weights that stay; None: what the method takes."""
    damping: float | None = None
    """Share of the mean diagonal added to the Gram matrix; None: chosen on held-out data."""


@frozen
class TrainingOptions:
    """How pruned weights are trained to give the dense model's outputs again."""

    data: str | None = None
    """What the user named, as calibration data are."""
    minutes: float = 20.0


class LossKind(str, Enum):
    """What pruning a layer is said to lose."""

    METRIC = "metric"
    OUTPUTS = "outputs"
    """||y - y'||^2 / ||y||^2 of the model's outputs."""

    __str__ = str.__str__


@frozen
class BudgetOptions:
    """How much pruning may cost, and how the cost is measured."""

    max_drop: float | None = None
    """Most that the figure may fall, in its own units: 0.5 of an accuracy in per cent is half a
    point, of one in 0 to 1 half of everything."""
    share: float | None = None
    """Least part of the possible saving, 0 to 1."""
    figure: str | None = None
    lower_is_better: bool = False
    """The figure falls where it grows: a loss, a perplexity."""
    loss: LossKind | None = None
    """What the layers are judged by; None: the metric, without one the outputs."""
    profile: str | None = None
    siblings: bool = False
    """Layers that read the same tensor (q, k and v) are decided together."""

    def __post_init__(self) -> None:
        if self.max_drop is not None and self.share is not None:
            raise BadInputError(
                "--max-drop and --budget cannot be given together", hint="leave one of them out"
            )
        if self.max_drop is not None and not 0 <= self.max_drop < inf:
            raise BadInputError(
                f"--max-drop {self.max_drop:g} is not a possible drop",
                hint="give 0 or more, in the units of the metric",
            )
        if self.share is not None and not 0 <= self.share <= 1:
            raise BadInputError(
                f"--budget {self.share:g} is not between 0 and 1",
                hint="give the part of the possible saving, such as 0.8",
            )

    @property
    def is_set(self) -> bool:
        """Whether layers are to be chosen."""
        return self.max_drop is not None or self.share is not None


@frozen
class SideBySide:
    """How many things are measured at once, and where; the results are the same."""

    jobs: int | None = None
    """Worker processes; None: one for each core."""
    ray: str | None = None
    """Address of a Ray cluster; None: this machine."""


@frozen
class Trust:
    """Which of the code that a run folder names may be run: anyone may have made the folder."""

    sources: tuple[str, ...] = ()
    """Sources that the user names too, in the words of the command that made the folder."""
    everything: bool = False


@frozen
class RunOptions(ExampleInputs):
    """Options of a run; what they leave out is decided once, when the run starts."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  # in a file, a misspelt name
    pattern: Pattern = HARDWARE_PATTERN
    selection: Selection = Selection()  # frozen
    method: MethodOptions = MethodOptions()
    calibration: CalibrationOptions = CalibrationOptions()
    training: TrainingOptions = TrainingOptions()
    precision: Precision | None = None
    """None: float16 (no sparse float32 kernel is known); an ONNX file in other types keeps them."""
    keep_float32: tuple[str, ...] = ()
    """Globs over the nodes of an ONNX file that keep float32 when its precision is changed."""
    opset: int | None = None
    dynamic_batch: bool = True
    dynamic: tuple[DynamicAxis, ...] | None = None
    """Axes of a torch model whose size stays free besides the batch; None: what the source has."""
    dense_reference: str | None = None
    """Model source of the dense model, where `model` was fine-tuned with its mask."""
    metric: str | None = None
    stream: bool | None = None
    """Prune a checkpoint in a copy of its files; None: one that is large."""
    budget: BudgetOptions = BudgetOptions()
    side_by_side: SideBySide = SideBySide()
    gpu: str | None = None
    """The GPU that forecasts are made for."""
    quantize: Quantization | None = None
    """Q/DQ nodes around products, in the dense and in the pruned model."""
    resume: bool = False
    """Keep the stages of an earlier run in the folder whose options and inputs did not change."""
    engine: str = "auto"
    build: BuildOptions = BuildOptions()
    trust: Trust = Trust()
    """Trust in the code that a run folder names, where one is given instead of a model."""


@frozen
class CompareOptions(ExampleInputs):
    """Options of a comparison."""

    engines: tuple[str, ...] = ()
    """engine:mode, such as "onnxruntime:cpu"; (): the engine of the run, else the first that can
    run here."""
    variants: bool = False
    """Everything that can run here: other engines, types, and modes of torch."""
    batches: tuple[int, ...] = ()
    """Sizes of the first axis of every input; (): the example inputs as they are."""
    rounds: int = 50
    warmup: int = 5
    time_limit_s: float = 120.0
    """Time for the rounds of one batch; at least ten rounds are run."""
    threads: int | None = None
    """CPU threads of every variant; None: the cores this process may use."""
    baseline: str | None = None
    shapes: tuple[str, ...] = ()
    metric: str | None = None
    fail_if: tuple[str, ...] = ()
    trust: Trust = Trust()
    """Trust in the code that makes the variants that are torch modules."""


class MathPrecision(str, Enum):
    """Type that a forecast computes products in."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    FP8 = "fp8"
    FP4 = "fp4"

    @property
    def kernels(self) -> str:
        """What tables of kernels call it, such as FP16."""
        return self.value.upper().replace("FLOAT", "F" if self.value[0] == "b" else "FP")

    @property
    def math_dtype(self) -> str:
        """What ONNX calls it, as in `Weight.math_dtype`."""
        return {"fp8": "float8_e4m3fn", "fp4": "float4_e2m1fn"}.get(self.value, self.value)

    @classmethod
    def of_dtype(cls, math_dtype: str) -> MathPrecision | None:
        """The precision whose `math_dtype` this is; None: kernels were measured in no such type."""
        return next((one for one in cls if one.math_dtype == math_dtype), None)

    @classmethod
    def _missing_(cls, value: object) -> MathPrecision | None:
        """Other words for the same: fp16, half, bf16, float8, float4."""
        word = str(value).strip().lower()
        known = {**_PRECISION_WORDS, "float8": "fp8", "float4": "fp4"}.get(word, word)
        return next((one for one in cls if one.value == known), None)


@frozen
class ForecastOptions:
    """What a forecast is made for."""

    gpus: tuple[str, ...] = ()
    """Names; (): those whose kernels were measured; "all": every GPU that is known."""
    precisions: tuple[MathPrecision, ...] = (MathPrecision.FLOAT16,)
    batches: tuple[int, ...] = ()
    """(): that of the inputs, and where nothing says it 1, 8 and 64."""
    profile: str | None = None
    """Path of the per-layer profile of a dense engine."""
