"""A model's forecast: sums by hand, what the rules and the defaults leave dense, notes, errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from math import exp, log, sqrt
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import published_gains
import pytest
from onnx import helper
from support import onnx_models as om
from support.forecast_cases import DENSE, LAYER, LOSING
from support.onnx_models import weights

import twofour
from twofour.eligibility.build_facts import NO_SPARSE_INT8
from twofour.errors import BadInputError
from twofour.forecasting.expected import expected_gain, verdict_of
from twofour.forecasting.gpus import gpu_named
from twofour.forecasting.model_forecast import PUBLISHED, times_of_layers, total_gain
from twofour.forecasting.products import Product
from twofour.graph.weights import find_weights
from twofour.records.forecast import WORTH, Forecast, ForecastGain, LayerForecast, Worth
from twofour.records.options import ForecastOptions, MathPrecision

A100 = ForecastOptions(gpus=("A100",), batches=(64,))


@pytest.mark.parametrize(
    ("layers", "rest_us", "gain", "low", "high"),
    [
        ([LAYER], 0.0, 2.0, 1.6, 2.5),
        ([LAYER, LAYER], 0.0, 2.0, 1.6, 2.5),  # of one size: they err alike
        ([LAYER], 100.0, 200 / 150, 200 / 162.5, 200 / 140),
        ([LOSING], 0.0, 1.0, 1.0, 1.25),  # the builder takes the dense kernel
        ([replace(LOSING, high=0.9)], 0.0, 1.0, 1.0, 1.02),  # timing alone
        ([DENSE], 0.0, 1.0, 1.0, 1.0),
        ([LAYER, DENSE], 0.0, 200 / 150, 200 / 162.5, 200 / 140),
        (
            [LAYER, replace(LAYER, rows=128)],
            0.0,
            2.0,
            200 / (100 + sqrt(0.5 * 25**2 + 0.5 * 2 * 12.5**2)),
            200 / (100 - sqrt(0.5 * 20**2 + 0.5 * 2 * 10**2)),
        ),
    ],
)
def test_the_gain_of_all_layers_is_dense_time_over_the_time_of_the_faster_kernels(
    layers: Sequence[LayerForecast], rest_us: float, gain: float, low: float, high: float
) -> None:
    found = total_gain(layers, rest_us)
    assert (found.gain, found.low, found.high) == pytest.approx((gain, low, high))


def model(path: Path) -> Path:
    """Two layers that can run sparse, one too narrow, a depthwise convolution and attention."""
    nodes = [
        helper.make_node("Conv", ["x", "first"], ["a"], name="first", pads=[1] * 4),
        helper.make_node("Conv", ["a", "depth"], ["b"], name="depth", group=256, pads=[1] * 4),
        helper.make_node("Conv", ["b", "wide"], ["c"], name="wide", pads=[1] * 4),
        helper.make_node("GlobalAveragePool", ["c"], ["d"]),
        helper.make_node("Flatten", ["d"], ["e"]),
        helper.make_node("MatMul", ["e", "head"], ["y"], name="head"),
    ]
    constants = {
        "first": weights(256, 3, 3, 3),
        "depth": weights(256, 1, 3, 3),
        "wide": weights(512, 256, 3, 3),
        "head": weights(512, 1024),
    }
    made = om.model(nodes, constants, inputs={"x": ("batch", 3, 28, 28)})
    return om.save(made, path / "net.onnx")


def forecast(path: Path, asked: ForecastOptions = A100) -> Forecast:
    return twofour.forecast(model(path), asked=asked)


def test_a_gpu_without_sparse_tensor_cores_is_left_out_beside_others(tmp_path: Path) -> None:
    found = forecast(tmp_path, replace(A100, gpus=("T4", "A100")))
    assert [cell.gpu for cell in found.cells] == ["A100 80GB PCIe"]
    assert any(note.endswith(": T4") for note in found.notes)
    with pytest.raises(BadInputError, match="no sparse"):
        forecast(tmp_path, replace(A100, gpus=("T4", "V100")))


def test_a_cell_adds_products_and_the_least_of_the_rest(tmp_path: Path) -> None:
    found = forecast(tmp_path)
    (cell,) = found.cells
    rows = {layer.layer: layer for layer in cell.layers}
    assert (found.name, cell.name) == ("net", "A100 80GB PCIe, float16, batch 64")
    assert found.notes[0] == "sizes: x (64 x 3 x 28 x 28)"
    assert {name: x.can_run_sparse for name, x in rows.items()} == {
        "first": False,
        "wide": True,
        "head": True,
    }
    assert rows["first"].reason.startswith("AXIS_NOT_MULTIPLE: C=3")
    convolutions = 28 * 28 * 9 * np.array([256, 256 * 3, 256 * 512])
    part = 100 * convolutions[0] / (sum(convolutions) + 512 * 1024)
    assert any(
        note.startswith("not in the table: 1 layer") and f"{part:.1f} %" in note
        for note in found.notes
    )
    wide = rows["wide"]
    assert (wide.rows, wide.outputs, wide.reduction) == (64 * 28 * 28, 512, 256 * 9)
    assert 1.3 < wide.low < wide.gain < wide.high < 2.0
    assert 1e12 * 2 * 64 * 784 * 512 * 2304 / (wide.dense_us * 1e6) == pytest.approx(
        250e12, rel=0.25
    )
    assert cell.dense_us == pytest.approx(sum(x.dense_us for x in cell.layers))
    image = 64 * 784 * 2  # bytes of one channel
    moved = (2 * 256 * image + 2 * 256 * 9) + (512 * image + 64 * 512 * 2)
    assert cell.rest_us == pytest.approx(moved / 1935e3, rel=1e-3)
    saved = sum(x.dense_us - x.sparse_us for x in rows.values() if x.gains)
    dense = cell.dense_us + cell.rest_us
    assert cell.model.gain == pytest.approx(dense / (dense - saved))
    assert 1 < cell.model.low < cell.model.gain < cell.products.gain
    assert cell.expected.gain == pytest.approx(1 / (1 - 0.5 * saved / dense))
    assert cell.verdict is Worth.LIKELY
    assert cell.sentence.startswith(f"Forecast for {cell.name}: {cell.in_words}, if the ")
    assert f". {cell.verdict_in_words}. {cell.why}. " in cell.sentence
    assert ("1 would lose" in cell.sentence) == rows["head"].loses


def test_without_names_the_measured_gpus_and_three_batches_are_forecast(tmp_path: Path) -> None:
    found = forecast(tmp_path, ForecastOptions())
    cells = found.cells
    assert found.notes[0] == "sizes: x (batch x 3 x 28 x 28)"
    assert [(c.gpu, c.batch) for c in cells[:4]] == [
        ("A100 80GB PCIe", 1),
        ("A100 80GB PCIe", 8),
        ("A100 80GB PCIe", 64),
        ("GeForce RTX 4090", 1),
    ]
    assert len(cells) == 6 * 3


def test_of_unnamed_gpus_those_that_lack_a_precision_are_left_out(tmp_path: Path) -> None:
    asked = ForecastOptions(precisions=(MathPrecision("float8"),), batches=(8,))
    cells = forecast(tmp_path, asked).cells
    assert "A100 80GB PCIe" not in {cell.gpu for cell in cells}
    assert {cell.precision for cell in cells} == {MathPrecision.FP8}
    notes = forecast(tmp_path, asked).notes
    assert any(note.startswith("float8_e4m3fn: ") for note in notes)


def test_a_model_without_products_is_refused(tmp_path: Path) -> None:
    node = helper.make_node("Relu", ["x"], ["y"])
    path = om.save(om.model([node], {}, inputs={"x": ("batch", 8)}), tmp_path / "relu.onnx")
    with pytest.raises(BadInputError, match="no convolution or matrix") as refused:
        twofour.forecast(path)
    assert "Conv, Gemm, MatMul" in str(refused.value.hint)


def test_layers_that_no_sparse_kernel_takes_are_not_worth_pruning(tmp_path: Path) -> None:
    path = om.save(om.conv(weights(8, 3, 3, 3)), tmp_path / "conv.onnx")
    (cell,) = twofour.forecast(path, asked=replace(A100, batches=())).cells
    assert cell.batch is None
    assert cell.model.gain == 1.0
    assert "(AXIS_NOT_MULTIPLE in 1)" in cell.sentence


def test_a_layer_that_pruning_leaves_dense_has_the_reason_of_the_report(tmp_path: Path) -> None:
    narrow = om.save(om.gemm(weights(4, 512), trans_b=1), tmp_path / "narrow.onnx")
    (cell,) = twofour.forecast(narrow, asked=replace(A100, batches=())).cells
    (layer,) = cell.layers
    assert (layer.can_run_sparse, layer.reason[:10]) == (False, "TOO_SMALL:")
    (verdict,) = twofour.report(onnx=narrow).verdicts
    codes = [reason.code.value for reason in verdict.reasons]
    assert codes[0] == "TOO_SMALL"
    assert "PATTERN_BROKEN" not in codes  # no pattern was tried


@pytest.mark.parametrize(
    ("gpu", "width", "said"),
    [
        (
            "RTX4090",
            1024,
            "Not worth it. Sparse kernels gain little or nothing in the 2 layers that can use "
            "them, which are mostly bound by memory",
        ),
        ("A100", 64, "which are mostly too small to fill the GPU"),
    ],
)
def test_a_small_gain_is_not_called_none(tmp_path: Path, gpu: str, width: int, said: str) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "up"], ["a"], name="up"),
        helper.make_node("MatMul", ["a", "down"], ["y"], name="down"),
    ]
    constants = {"up": weights(width, 4 * width), "down": weights(4 * width, width)}
    made = om.model(nodes, constants, inputs={"x": ("batch", width)})
    path = om.save(made, tmp_path / "mlp.onnx")
    (cell,) = twofour.forecast(path, asked=replace(A100, gpus=(gpu,), batches=(8,))).cells
    assert cell.verdict is Worth.NO
    assert cell.model.high > cell.model.gain
    assert said in cell.sentence


@pytest.mark.parametrize(("asked", "said"), [("float16", True), ("int8", False)])
def test_a_quantized_file_says_which_precision_is_its_own(
    tmp_path: Path, asked: str, said: bool
) -> None:
    kept = weights(16, 8, 3, 3, dtype=np.int8)
    made = om.quantized_conv(kept, zero_point=None, quantize_output=True)
    path = om.save(made, tmp_path / "conv.onnx")
    options = ForecastOptions(gpus=("A100",), precisions=(MathPrecision(asked),))
    found = twofour.forecast(path, asked=options)
    assert any("add --precision int8" in note for note in found.notes) is said


def test_gains_over_slow_dense_kernels_are_said_to_be_so(tmp_path: Path) -> None:
    asked = replace(A100, gpus=("A100", "B200"), precisions=(MathPrecision.INT8,))
    found = forecast(tmp_path, asked)
    slow = "dense kernels of B200 are slower in INT8 than in FP16: gains over them are large"
    assert [{x.note for x in cell.layers} for cell in found.cells] == [{None}, {slow}]
    assert slow in found.notes


def test_a_missing_kernel_is_told_once_with_its_source(tmp_path: Path) -> None:
    asked = replace(A100, gpus=("B300",), precisions=(MathPrecision.INT8,))
    said = [note for note in forecast(tmp_path, asked).notes if "int8" in note]
    assert said == [f"int8: {NO_SPARSE_INT8.in_words}"]


def profile(path: Path, rows: dict[str, float]) -> str:
    items = [{"name": name, "averageMs": ms} for name, ms in rows.items()]
    path.write_text(json.dumps([{"count": 10}, *items]))
    return str(path)


def test_a_profile_replaces_the_least_of_the_rest_by_measured_times(tmp_path: Path) -> None:
    file = profile(tmp_path / "p.json", {"first": 1.0, "depth": 0.5, "wide + relu": 4.0, "pool": 1})
    (cell,) = forecast(tmp_path, replace(A100, profile=file)).cells
    (wide,) = (x for x in cell.layers if x.layer == "wide")
    assert cell.engine is not None
    assert cell.engine.gain == pytest.approx(6.5 / (2.5 + 4 / wide.gain))
    assert cell.engine.low == pytest.approx(6.5 / (2.5 + 4 / wide.low))
    assert f"at most {cell.engine.gain:.2f}x with the times" in cell.sentence
    assert cell.expected.gain == pytest.approx(1 / (1 - 0.5 * (4 - 4 / wide.gain) / 6.5))
    assert cell.engine.layers == 2
    assert [cell.engine.products_us, cell.engine.rest_us] == pytest.approx([5000, 1500])
    both = replace(A100, batches=(1, 8), profile=file)
    with pytest.raises(BadInputError, match="--profile is of one"):
        forecast(tmp_path, both)
    other = profile(tmp_path / "p.json", {"stranger": 1.0})
    with pytest.raises(BadInputError, match="--profile: none of"):
        forecast(tmp_path, replace(A100, profile=other))


def test_a_gain_that_only_the_cache_makes_counts_as_that_of_the_bytes(tmp_path: Path) -> None:
    """Decoding on an RTX 4090, 72 MiB of L2: 112 MiB of dense weights, 63 MiB of 2:4 ones."""
    alone = twofour.product_times("RTX4090", "FP16", rows=64, outputs=14336, reduction=4096)
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="up")
    made = om.model(
        [node], {"w": np.ones((4096, 14336), np.float32)}, inputs={"x": ("batch", 4096)}
    )
    asked = replace(A100, gpus=("RTX4090",))
    found = twofour.forecast(om.save(made, tmp_path / "up.onnx"), asked=asked)
    (layer,) = found.cells[0].layers
    assert alone.gain > 2
    assert (layer.dense_us, layer.gain, layer.high) == (alone.dense_us, 16 / 9, 16 / 9)
    assert layer.low < layer.gain
    assert layer.sparse_us == pytest.approx(alone.dense_us * 9 / 16)
    assert any("1.78x at most" in note for note in found.notes)


def test_a_module_in_memory_is_traced_and_not_pruned() -> None:
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 32))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    (cell,) = twofour.forecast(net, torch.ones(2, 64), asked=A100).cells
    assert [(x.layer, x.rows, x.outputs, x.reduction) for x in cell.layers] == [
        ("0", 64, 256, 64),
        ("1", 64, 32, 256),
    ]
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_half_precision_has_the_names_that_users_type() -> None:
    names = ("fp16", "half", "bf16", "float8", "fp4", "int8")
    assert [MathPrecision(name).kernels for name in names] == [
        "FP16", "FP16", "BF16", "FP8", "FP4", "INT8",
    ]  # fmt: skip


RESNET18_US = {
    (401408, 64, 147, 12): (111.6,),
    (100352, 64, 576, 9): (53.2, 53.2, 51.2, 54.3),
    (25088, 128, 576, 2): (28.7,),
    (25088, 128, 1152, 9): (41.0, 39.9, 42.0),
    (25088, 128, 64, 1): (17.4,),
    (6272, 256, 1152, 2): (26.6,),
    (6272, 256, 2304, 9): (41.0, 39.9, 43.0),
    (6272, 256, 128, 1): (14.3,),
    (1568, 512, 2304, 2): (27.6,),
    (1568, 512, 4608, 9): (48.1, 49.2, 50.2),
    (1568, 512, 256, 1): (13.3,),
    (32, 1000, 512, 1): (11.3,),
}
"""Rows, outputs, reduction, overlap -> microseconds of each layer of that size in a profile by
trtexec 8.4: ResNet-18, FP16, A100, batch 32 (an example of NVIDIA's engine explorer)."""


def test_dense_convolutions_take_about_as_long_as_in_a_profile_of_tensorrt() -> None:
    (weight,) = find_weights(om.conv(weights(8, 4, 3, 3))).weights
    products = [
        Product(
            layer=weight, rows=m, outputs=n, reduction=k, count=1, inputs=m * k, overlap=overlap
        )
        for m, n, k, overlap in RESNET18_US
    ]
    place = gpu_named("A100"), MathPrecision.FLOAT16
    found = times_of_layers(products, place)
    pairs = zip(found, RESNET18_US.values(), strict=True)
    errors = [abs(log(time.dense_us / us)) for time, measured in pairs for us in measured]
    assert len(errors) == 21
    assert exp(median(errors)) < 1.25


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, "2.00x (1.60 to 2.50)"),
        ({"bound": "bound by memory (only 8 rows)"}, "2.00x (1.60 to 2.50), bound by memory (only"),
        (
            {"op": "Conv"},
            "2.00x (1.60 to 2.50), counted as the product of its size, no convolution",
        ),
        ({"can_run_sparse": False, "reason": "SHARED_WEIGHT: a"}, "none is counted: SHARED_W"),
        ({"can_run_sparse": False}, "none is counted: it is not pruned"),
    ],
)
def test_a_layer_says_what_it_gains_and_why_not_more(changed: dict[str, Any], words: str) -> None:
    assert replace(LAYER, **changed).answer.startswith(words)


# --- what is expected of the bound ----------------------------------------------------------------


INT8 = replace(LAYER, precision="INT8")


@pytest.mark.parametrize(
    ("layers", "rest_us", "saved", "most"),
    [
        ((LAYER,), 0.0, 0.5, 2.0),
        ((LAYER,), 100.0, 0.25, 4 / 3),
        ((LAYER, DENSE), 0.0, 0.25, 4 / 3),
        ((LAYER,), 900.0, 0.05, 1 / 0.95),
        ((LOSING,), 0.0, 0.0, 1.0),  # the builder takes the dense kernel
        ((INT8,), 0.0, 1 - 1 / 1.6, 2.0),  # cuBLASLt's dense kernels are slow in 8 bits
        ((replace(INT8, gain=1.25, sparse_us=80.0),), 0.0, 0.2, 1.25),
    ],
)
def test_half_of_the_saving_of_the_kernels_is_expected(
    layers: tuple[LayerForecast, ...], rest_us: float, saved: float, most: float
) -> None:
    expected = expected_gain(layers, rest_us)
    assert expected.gain == pytest.approx(1 / (1 - 0.5 * saved))
    assert expected.low == pytest.approx(1 / (1 - 0.1 * saved) / 1.02)
    # never above the bound: two timings of an engine that saves nothing differ by 2 %
    assert expected.high == pytest.approx(min(1.02 / (1 - 0.85 * saved), most))


@pytest.mark.parametrize(
    ("at_most", "verdict"),
    [
        (1.2, Worth.LIKELY),
        (1.1957, Worth.LIKELY),  # shown as 1.20
        (1.194, Worth.TRY_FIRST),
        (1.05, Worth.TRY_FIRST),
        (1.044, Worth.NO),
        (1.0, Worth.NO),
    ],
)
def test_the_verdict_follows_from_the_bound(at_most: float, verdict: Worth) -> None:
    assert verdict_of(ForecastGain(gain=at_most, low=1.0, high=2.0)) is verdict


@pytest.mark.parametrize(
    ("first", "count", "median", "ninth", "holds"),
    [((0, 0), 430, 8.5, 23, 75), (published_gains.REPAIRED, 328, 7, 17, 84)],
)
def test_the_expected_gain_is_near_that_of_published_engines(
    first: tuple[int, int], count: int, median: float, ninth: float, holds: float
) -> None:
    """Error in percent: median and 90th percentile; how often the interval holds."""
    engines = [engine for engine in published_gains.published() if engine.version >= first]
    error = [100 * abs(engine.expected.gain / engine.gain - 1) for engine in engines]
    inside = [engine.expected.low <= engine.gain <= engine.expected.high for engine in engines]
    assert len(engines) == count
    assert np.median(error) < median
    assert np.quantile(error, 0.9) < ninth
    assert 100 * np.mean(inside) > holds


def test_the_fit_to_published_engines_is_near_the_shares_that_are_taken() -> None:
    engines = published_gains.published()
    saved = np.array([engine.saved for engine in engines])
    gain = np.array([engine.gain for engine in engines])
    share, low, high = published_gains.fit(saved, gain, np.ones(len(engines)))
    assert share == pytest.approx(0.50, abs=0.1)
    assert low == pytest.approx(0.10, abs=0.1)
    assert high == pytest.approx(0.85, abs=0.1)


def test_an_answer_counts_the_engines_of_the_table_by_their_bound() -> None:
    gains: dict[Worth, list[float]] = {verdict: [] for verdict in Worth}
    for engine in published_gains.published():
        if engine.version >= published_gains.REPAIRED:
            gains[verdict_of(engine.at_most)].append(engine.gain)
    assert len(gains.pop(Worth.NO)) <= 1, "too few to say a share of them"
    assert {
        verdict: (len(all_of_it), sum(gain > WORTH for gain in all_of_it))
        for verdict, all_of_it in gains.items()
    } == {verdict: counts[:2] for verdict, counts in PUBLISHED.items()}
