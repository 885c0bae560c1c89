"""A whole model on a GPU: the times of its products, the least of the rest, and what both gain."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain
from math import sqrt
from pathlib import Path

from twofour.eligibility.build_evidence import NO_ENGINE, BuildEvidence
from twofour.eligibility.build_facts import ReportContext
from twofour.eligibility.predict import predict
from twofour.eligibility.reasons import obstacles
from twofour.eligibility.rules import holds_trivially
from twofour.eligibility.sightings import find_sightings
from twofour.eligibility.totals import uncounted
from twofour.errors import BadInputError
from twofour.forecasting.expected import TIMING, expected_gain, verdict_of
from twofour.forecasting.gpus import all_gpus, gpu_named, is_older
from twofour.forecasting.kernels import IN_CACHE, measured_products, times_of_products
from twofour.forecasting.products import Product, Work, find_work, shapes_at
from twofour.forecasting.roofline import BYTES, KEPT
from twofour.graph.opened import OpenedModel
from twofour.inputs.fits import Shapes, batch_names
from twofour.logs.layer_info import read_profile
from twofour.records import frozen
from twofour.records.eligibility import EligibilityReport, VerdictName
from twofour.records.export import LayerMap, TensorShape
from twofour.records.forecast import (
    WORTH,
    Basis,
    EngineGain,
    Forecast,
    ForecastCell,
    ForecastGain,
    GpuKind,
    LayerForecast,
    ProductTimes,
    Worth,
)
from twofour.records.log import Profile
from twofour.records.options import ForecastOptions, MathPrecision
from twofour.records.weights import (
    HARDWARE_PATTERN,
    LayerWeight,
    ReasonCode,
    Validation,
    Weight,
    WeightCheck,
    shared,
)
from twofour.words import count, listed, share

ALL_GPUS = "all"
Place = tuple[GpuKind, MathPrecision]
"""Where and in what products are computed."""
CORRELATION = 0.5
"""Between the errors of two layers of different sizes: the kernels of one GPU err alike."""
_SHORT = 3.0
"""Kernels that take so many times longer than what they compute or move need are too small."""


@frozen
class ForecastModel:
    """A model as a forecast takes it."""

    name: str
    opened: OpenedModel
    weights: tuple[Weight, ...]
    """One for each of the graph's, under the names of their modules."""
    pruned: Set[str]
    """Arrays that pruning takes by default."""
    source: str = ""
    """What a command calls it; "": no command can."""
    layer_map: LayerMap | None = None
    dense_profile: Profile | None = None
    """Times of a dense engine of the model, at the sizes of the one cell."""


def forecast_model(model: ForecastModel, shapes: Shapes, options: ForecastOptions) -> Forecast:
    """A cell for each GPU, precision and batch, at the `shapes` of the inputs if no batch is asked.

    Raises BadInputError for an unknown GPU, a precision that one lacks, a batch that the file
    fixes, and a model without products.
    """
    inputs = model.opened.inputs
    batches = options.batches or (_batch(inputs, shapes),)
    at_batch = {batch: shapes_at(inputs, shapes, batch) for batch in batches}
    works = {b: find_work(model.opened, model.weights, at) for b, at in at_batch.items()}
    sizes = _sizes(inputs, [*at_batch.values()])
    any_work = next(iter(works.values()))
    _refuse_without_products(any_work)
    places = _places(options)
    if options.profile is not None:
        model = _with_profile(model, Path(options.profile), len(places) * len(works))
    cells, rules = _cells(model, works, places)
    return Forecast(
        name=model.name,
        cells=tuple(_answered(cell, model, at_batch[cell.batch]) for cell in cells),
        notes=(sizes, *_left_out(options.gpus), *_notes(cells, any_work, options, rules)),
    )


def _refuse_without_products(work: Work) -> None:
    """Raise BadInputError unless a layer can be counted."""
    if work.products:
        return
    if not work.uncounted:
        raise BadInputError(
            "no convolution or matrix product here has a weight and one group",
            hint="2:4 prunes the constant weights of Conv, Gemm, MatMul and Einsum: none is left "
            "here",
        )
    raise BadInputError(
        "onnx does not know the multiply-adds of any layer with a weight, such as "
        f"{work.uncounted[0]}",
        hint="export with fixed sizes, without loops, and of an If only the branch that you deploy",
    )


def _batch(inputs: Sequence[TensorShape], shapes: Shapes) -> int | None:
    """The batch of `shapes`; None where the model leaves none free."""
    names = batch_names(inputs)
    for tensor in inputs:
        if tensor.shape and tensor.shape[0] in names:
            return shapes[tensor.name][0]
    return None


def _with_profile(model: ForecastModel, path: Path, forecasts: int) -> ForecastModel:
    profile = read_profile(path)
    if forecasts > 1:
        raise BadInputError(
            f"--profile is of one engine, and {forecasts} forecasts are asked for",
            hint="name the one --gpu, --precision and --batch that it was measured with",
        )
    return replace(model, dense_profile=profile)


def _cells(
    model: ForecastModel,
    works: Mapping[int | None, Work],
    places: Iterable[Place],
) -> tuple[list[ForecastCell], list[EligibilityReport]]:
    """A cell for each place and batch, and what the rules say; GPUs of one kind have the same."""
    rules: dict[object, EligibilityReport] = {}
    cells = []
    for gpu, precision in places:
        key = (gpu.compute_capability, precision)
        if key not in rules:
            rules[key] = rules_once_pruned(model, gpu, precision)
        for batch, work in works.items():
            cells.append(forecast_cell(model, work, (gpu, precision, batch), rules[key]))
    return cells, [*rules.values()]


def _sizes(inputs: Sequence[TensorShape], shapes: Sequence[Shapes]) -> str:
    """The sizes of the inputs, which are the same at every batch but for the batch itself."""
    in_words = []
    for tensor in inputs:
        sizes = zip(*(at[tensor.name] for at in shapes), strict=True)
        # sizes 1, 8 and 32 of an axis are the batch
        dims = tuple(axis[0] if len({*axis}) == 1 else "batch" for axis in sizes)
        in_words.append(replace(tensor, shape=dims).in_words)
    return f"sizes: {listed(in_words)}"


def _places(options: ForecastOptions) -> list[Place]:
    """Each GPU with each precision; of GPUs that nobody names, with those that it has.

    Without names they are those that were measured.
    """
    gpus = all_gpus()
    is_named = options.gpus not in ((), (ALL_GPUS,))
    if options.gpus != (ALL_GPUS,):
        measured = {name for name, _ in measured_products()}
        known = (gpu.measured_as for gpu in gpus if gpu.measured_as in measured)
        others = [name for name in options.gpus if not is_older(name)]
        gpus = tuple(map(gpu_named, others or options.gpus or known))
    places = []
    for gpu in dict.fromkeys(gpus):
        precisions = list(dict.fromkeys(options.precisions))
        if not is_named:
            precisions = [own for own in precisions if own.kernels in dict(gpu.tflops)]
        places += [(gpu, precision) for precision in precisions]
    return places


def _left_out(names: Iterable[str]) -> Iterator[str]:
    older = [name for name in names if is_older(name)]
    if older:
        yield f"left out, for lack of sparse tensor cores: {listed(older)}"


_ALWAYS = (
    "every figure is a forecast from kernels of cuBLASLt and cuSPARSELt that others measured; none "
    "was measured on this model, and TensorRT has kernels of its own",
    '"expected" is half of the saving that the kernels promise, as in published TensorRT engines '
    "(mostly BERT; the few CNNs gained less); about 80 % of these gained between the two figures "
    "in brackets",
    '"at most" means: each kernel gains what it gains alone, other work than products with weights '
    "is counted at the GPU's peak speed, and elementwise work as no time",
)
_CONVOLUTIONS = (
    "no convolution was measured: it counts as its implicit product (batch x output positions "
    "rows, input channels x kernel reduction), read once where that is faster, and has its interval"
)


def _notes(
    cells: Sequence[ForecastCell],
    work: Work,
    options: ForecastOptions,
    rules: Iterable[EligibilityReport],
) -> Iterator[str]:
    yield from _ALWAYS
    if any(product.layer.kernel for product in work.products):
        yield _CONVOLUTIONS
    computed = {product.layer.math_dtype for product in work.products}
    for own in MathPrecision:
        if own.math_dtype in computed and own not in options.precisions:
            yield f"the file computes in {own.value}: add --precision {own.value}"
    scaled = dict.fromkeys(cell.gpu for cell in cells if cell.basis is Basis.SCALED)
    if scaled:
        yield f"others measured nothing on {listed([*scaled])}: times of another GPU are scaled"
    layers = chain.from_iterable(cell.layers for cell in cells)
    notes = filter(None, (layer.note for layer in layers))
    yield from dict.fromkeys((*_doubts(rules), *notes))
    if work.unsure:
        ops = listed([f"{op} ({count(n, 'node')})" for op, n in sorted(work.unsure.items())])
        yield f"assumed to run once, and to take as long as reading and writing its bytes: {ops}"
    if work.apart:
        theirs = sum(work.apart)
        part = share(theirs, theirs + sum(product.multiply_adds for product in work.products))
        yield (
            f"not in the table: {count(len(work.apart), 'layer')} with groups, or with weights "
            f"that pruning cannot take ({part} of the layers' multiply-adds); counted as other work"
        )
    if work.uncounted:
        yield f"{uncounted(work.uncounted)}: these layers are left out"


def _doubts(rules: Iterable[EligibilityReport]) -> Iterator[str]:
    """What the rules say against a type of numbers, each with its source."""
    verdicts = chain.from_iterable(report.verdicts for report in rules)
    for reason in chain.from_iterable(verdict.reasons for verdict in verdicts):
        if reason.code is ReasonCode.DTYPE:
            source = f" ({reason.source})" if reason.source else ""
            yield reason.message + source


def rules_once_pruned(
    model: ForecastModel, gpu: GpuKind, precision: MathPrecision
) -> EligibilityReport:
    """What the rules say of every layer once its weight is pruned and computes in this type."""
    weights = [replace(w, math_dtype=precision.math_dtype) for w in model.weights]
    checks = [_once_pruned(w, model.pruned) for w in weights if w.weight and w.axis is not None]
    context = ReportContext(
        model=model.name,
        pattern=HARDWARE_PATTERN,
        engine=NO_ENGINE,
        gpu=gpu.as_gpu,
        activation_products=0,
    )
    validation = Validation(files=(), pattern=HARDWARE_PATTERN, checks=tuple(checks))
    return predict(weights, validation, context)


def _once_pruned(weight: Weight, pruned: Set[str]) -> WeightCheck:
    """A check of a weight whose array is one of `pruned`, or stays dense."""
    required = weight.weight in pruned
    holds = required or holds_trivially(weight.shape, weight.axis, HARDWARE_PATTERN)
    return WeightCheck(
        **shared(weight, LayerWeight) | {"weight": weight.weight, "axis": weight.axis},
        groups_checked=0,
        violations=0 if holds else 1,
        first_violation=None,
        holds_along=None,
        required=required,
    )


def forecast_cell(
    model: ForecastModel,
    work: Work,
    place: tuple[GpuKind, MathPrecision, int | None],
    rules: EligibilityReport,
) -> ForecastCell:
    """What the model gains on this GPU, in this precision and at the batch of `work`.

    Raises BadInputError for a precision that the GPU lacks.
    """
    gpu, precision, batch = place
    layers = _layers(model, work.products, (gpu, precision), rules)
    rest_us = sum(least_us(*least, gpu, precision) for least in work.rest)
    of_weight = {p.layer: x for p, x in zip(work.products, layers, strict=True)}
    engine = None
    expected = expected_gain(layers, rest_us)
    if model.dense_profile is not None:
        timed, others_us = _timed(model, of_weight, rules)
        engine = _engine_gain(timed, others_us)
        expected = expected_gain(timed, others_us)
    at_most = total_gain(layers, rest_us)
    return ForecastCell(
        gpu=gpu.name,
        precision=precision,
        batch=batch,
        products=total_gain(layers, 0.0),
        model=at_most,
        engine=engine,
        expected=expected,
        verdict=verdict_of(engine or at_most),
        rest_us=rest_us,
        basis=_least_sure(layers),
        layers=layers,
        sentence="",
    )


def _least_sure(layers: Sequence[LayerForecast]) -> Basis:
    usable = [layer for layer in layers if layer.can_run_sparse]
    return max((x.basis for x in usable or layers), key=list(Basis).index)


_TIMES = ("dense_us", "dense_low_us", "dense_high_us", "sparse_us")
_SPARSE = {VerdictName.ELIGIBLE: True, VerdictName.UNKNOWN: None}


def _layers(
    model: ForecastModel,
    products: Sequence[Product],
    place: Place,
    rules: EligibilityReport,
) -> tuple[LayerForecast, ...]:
    """A row for each product; every size is looked up once."""
    verdicts = dict(zip(model.weights, rules.verdicts, strict=True))
    rows = []
    for product, time in zip(products, times_of_layers(products, place), strict=True):
        weight, verdict = product.layer, verdicts[product.layer]
        against = obstacles(verdict.reasons)
        rows.append(
            LayerForecast(
                **shared(time, ProductTimes)
                | {"rows": product.rows, "outputs": product.outputs}
                | {name: getattr(time, name) * product.count for name in _TIMES},
                layer=weight.layer,
                op=weight.op,
                count=product.count,
                reason=f"{against[0].code.value}: {against[0].message}" if against else "",
                can_run_sparse=weight.weight in model.pruned
                and _SPARSE.get(verdict.verdict, False),
                bound=_bound(product, time.dense_us, place),
            )
        )
    return tuple(rows)


def times_of_layers(products: Sequence[Product], place: Place) -> tuple[ProductTimes, ...]:
    """The times of each product; every size is looked up once.

    A convolution reads each input value once, its implicit product `overlap` times: where memory is
    the bound, a product that reads as little is nearer. The faster of both is taken. Measured: on
    the 21 layers of TensorRT's profile of ResNet-18 (A100, FP16, batch 32) the median error of the
    dense time falls from 31 % to 18 %. A size that was measured is taken first.
    """
    gpu, precision = place
    sizes = list(dict.fromkeys(chain.from_iterable(product.sizes for product in products)))
    alone = times_of_products(gpu, precision.kernels, sizes)
    times = dict(zip(sizes, map(_beside_others, alone), strict=True))

    def fastest(product: Product) -> ProductTimes:
        both = [times[size] for size in product.sizes]
        return min(both, key=lambda time: (time.basis is not Basis.MEASURED, time.dense_us))

    return tuple(map(fastest, products))


def _beside_others(time: ProductTimes) -> ProductTimes:
    """The gain in a model: no more than the bytes if only a kernel alone has its weights cached."""
    if time.note != IN_CACHE:
        return time
    most = 1 / KEPT[time.precision]
    part = min(1.0, most / time.gain)
    gains = {name: min(getattr(time, name) * part, most) for name in ("gain", "low", "high")}
    note = f"{IN_CACHE}: the gain of such a layer counts as {most:.2f}x at most"
    return replace(time, **gains, sparse_us=time.dense_us / gains["gain"], note=note)


def saved_ms(model: OpenedModel, shapes: Shapes, gpu: GpuKind) -> dict[str | None, float]:
    """Milliseconds that each node is forecast to save, in the type that it computes in.

    Nodes without a product, or in a type that no kernel was measured in, are left out. Raises
    BadInputError for a type that the GPU lacks.
    """
    products = find_work(model, model.weights().weights, shapes).products
    saved: dict[str | None, float] = {}
    for precision in MathPrecision:
        there = [p for p in products if p.layer.math_dtype == precision.math_dtype]
        for product, times in zip(there, times_of_layers(there, (gpu, precision)), strict=True):
            saved_us = product.count * max(0, times.dense_us - times.sparse_us)
            saved[product.layer.node] = saved_us / 1e3
    return saved


def total_gain(layers: Iterable[LayerForecast], rest_us: float) -> ForecastGain:
    """The gain of all layers together beside `rest_us`, which stays as it is.

    Each layer that can run sparse takes its faster kernel, as the builder does. Layers of one size
    err alike; the errors of others add up half as if they were one and half as if by chance. Timing
    alone makes the highest gain 2 % higher where a layer can run sparse.
    """
    dense = best = rest_us
    faster: dict[tuple[int, ...], float] = defaultdict(float)
    slower: dict[tuple[int, ...], float] = defaultdict(float)
    for layer in layers:
        dense += layer.dense_us
        best += (best_us := layer.dense_us - layer.saves_us)
        if layer.can_run_sparse:
            size = (layer.rows, layer.outputs, layer.reduction)
            faster[size] += best_us - layer.dense_us / max(1.0, layer.high)
            slower[size] += layer.dense_us / max(1.0, layer.low) - best_us
    noise = TIMING if faster else 1.0
    return ForecastGain(
        gain=dense / best,
        low=dense / (best + _together(slower.values())),
        high=max(dense / (best - _together(faster.values())), noise * dense / best),
    )


def _together(errors: Iterable[float]) -> float:
    # errors of 3 and 4 us: between 5 (by chance) and 7 (as one)
    each_us = list(errors)
    squares = sum(error * error for error in each_us)
    return sqrt(CORRELATION * sum(each_us) ** 2 + (1 - CORRELATION) * squares)


def least_us(values: float, multiply_adds: float, gpu: GpuKind, precision: MathPrecision) -> float:
    """The time that the memory or the tensor cores need, whichever is longer."""
    rate = dict(gpu.tflops).get(precision.kernels) or dict(gpu.tflops)["FP16"]
    moved = values * BYTES[precision.kernels] / (gpu.bandwidth_gb_s * 1e3)
    return max(moved, 2 * multiply_adds / (rate * 1e6))


def _engine_gain(timed: Sequence[LayerForecast], rest_us: float) -> EngineGain:
    return EngineGain(
        **shared(total_gain(timed, rest_us), ForecastGain),
        layers=len(timed),
        products_us=sum(layer.dense_us for layer in timed),
        rest_us=rest_us,
    )


def _timed(
    model: ForecastModel, layers: Mapping[Weight, LayerForecast], rules: EligibilityReport
) -> tuple[list[LayerForecast], float]:
    """Layers with the measured times of a dense engine, and its microseconds of all else.

    The layers keep their forecast gains. A row of the profile with several layers is theirs in
    proportion to their forecast times. Raises BadInputError for a profile that leads to none of
    the layers.
    """
    evidence = BuildEvidence(
        dense_profile=model.dense_profile, nodes=model.opened.nodes, layer_map=model.layer_map
    )
    seen = find_sightings(rules, evidence)
    of_node = {
        sighting.node: layers[weight]
        for sighting, weight in zip(seen.rows, model.weights, strict=True)
        if weight in layers
    }
    timed = []
    rest_us = 0.0
    for row in seen.dense_profile:
        there = [of_node[node] for node in row.nodes if node in of_node]
        whole = sum(layer.dense_us for layer in there)
        if not there:
            rest_us += 1e3 * row.ms
        for layer in there:
            us = 1e3 * row.ms * layer.dense_us / whole
            timed.append(replace(layer, dense_us=us, sparse_us=us / layer.gain))
    if not timed:
        raise BadInputError(
            "--profile: none of its layers is in this model",
            hint="give the profile of the model's dense engine, such as dense.profile.json",
        )
    return timed, rest_us


# --- the answer in words --------------------------------------------------------------------------


PUBLISHED = {
    Worth.LIKELY: (291, 251, "of 1.2 or more"),
    Worth.TRY_FIRST: (37, 19, "from 1.05 to 1.2"),
}
"""Published engines of TensorRT 8.5 and later, those that gained more than 5 %, and their bound.

Counted by `python benchmarks/kernel_model.py --published`.
"""
_MOSTLY = "Most are BERT; the few CNNs gained less, and only a build decides"
_OPTIONS = {
    MathPrecision.BFLOAT16: " --precision bfloat16",
    MathPrecision.INT8: " --quantize int8 --calibrate DATA --method magnitude",
}
"""What makes a file compute in a precision, besides float16, which is the default."""


def _answered(cell: ForecastCell, model: ForecastModel, shapes: Shapes) -> ForecastCell:
    """The cell with its answer in words, and the command that tries it at these shapes."""
    command = ""
    if cell.verdict is Worth.TRY_FIRST and model.source:
        command = _command(model, cell.precision, shapes)
    cell = replace(cell, why=_why(cell), command=command)
    return replace(cell, sentence=_sentence(cell))


def _command(model: ForecastModel, precision: MathPrecision, shapes: Shapes) -> str:
    # "twofour prune-export-build net.onnx --shapes x=8x512"
    command = f"twofour prune-export-build {shlex.quote(model.source)}"
    for tensor in model.opened.inputs:
        sizes = shapes[tensor.name]
        if sizes != tensor.shape:
            shape = f"{tensor.name}={'x'.join(map(str, sizes))}"
            command += f" --shapes {shlex.quote(shape)}"
    if all(weight.math_dtype != precision.math_dtype for weight in model.weights):
        command += _OPTIONS.get(precision, "")
    return command


def _sentence(cell: ForecastCell) -> str:
    """The answer for one cell: what is gained and in which layers, the verdict, and why."""
    measured = "" if cell.engine is None else " with the times of --profile"
    layers = ""
    if cell.is_worth:
        gaining = sum(layer.gains for layer in cell.layers)
        losing = sum(layer.loses for layer in cell.layers)
        them = "layer that gains runs" if gaining == 1 else f"{gaining} layers that gain run"
        others = f" ({losing} would lose and run dense)" if losing else ""
        layers = f", if the {them} sparse{others}"
    gain = f"Forecast for {cell.name}: {cell.in_words}{measured}{layers}"
    answer = f"{gain}. {cell.verdict_in_words}. {cell.why}"
    if cell.is_worth:
        answer += f". {_MOSTLY}"
    return answer


def _why(cell: ForecastCell) -> str:
    if cell.verdict is Worth.NO:
        return _why_not(cell)
    engines, gaining, bound = PUBLISHED[cell.verdict]
    part = f"{100 * gaining / engines:.0f} %"
    words = f"published TensorRT engines with a bound {bound}, {part} gained more than 5 %"
    return f"Of {engines} {words}"


def _why_not(cell: ForecastCell) -> str:
    usable = [layer for layer in cell.layers if layer.can_run_sparse]
    if not usable:
        codes = Counter(x.reason.partition(":")[0] for x in cell.layers if x.reason)
        why = ", ".join(f"{code} in {number}" for code, number in codes.most_common(3))
        return f"No layer can run sparse ({why})"
    if total_gain(usable, 0.0).gain >= WORTH:
        return "Layers that can run sparse take too little of the time"
    waits: Counter[str] = Counter()
    for layer in usable:
        waits[layer.bound.partition(" (")[0]] += round(1e3 * layer.dense_us)
    most = max(waits, key=waits.__getitem__)
    able = count(len(usable), "layer")
    slow = f"Sparse kernels gain little or nothing in the {able} that can use them"
    return f"{slow}, which are mostly {most}" if most else slow


def _bound(product: Product, dense_us: float, place: Place) -> str:
    """What a dense product waits for, where it is not the tensor cores."""
    weights = product.outputs * product.reduction
    inputs_outputs = product.rows * (product.reduction + product.outputs)
    moved = least_us(inputs_outputs + weights, 0, *place)
    computed = least_us(0, product.rows * weights, *place)
    if dense_us > _SHORT * max(moved, computed):
        return "too small to fill the GPU"
    if moved <= computed:
        return ""
    few = f" (only {count(product.rows, 'row')})" if weights > inputs_outputs else ""
    return f"bound by memory{few}"
