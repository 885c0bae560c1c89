"""Which rows a comparison has, and which layers over several profiles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from twofour.comparing.compared import ComparedModel, TorchRequest
from twofour.comparing.measure import middle_profile
from twofour.comparing.variants import StatusesOf, parse_engines, plan_variants
from twofour.errors import BadInputError
from twofour.records.export import EngineStatus, LayerTime, TensorShape
from twofour.records.options import CompareOptions, ExampleInputs

TORCH = TorchRequest(
    source="m.py:make",
    arguments=ExampleInputs(),
    weights=None,
    inputs=(TensorShape(name="x", dtype="float32", shape=("batch", 8)),),
    output_names=("y",),
)
DENSE = ComparedModel(weights="dense", onnx=Path("dense.onnx"), torch=TORCH, dense=True)
SPARSE = ComparedModel(weights="sparse", onnx=Path("sparse.onnx"), torch=TORCH)
MODES: dict[str, dict[str, str | None]] = {
    "tensorrt": {"gpu": None, "gpu-sparsity-off": None},
    "onnxruntime": {"cpu": None, "cuda": "no GPU", "int8": None},
    "torch": {"eager": None, "compile": None, "semi-structured-cutlass": None},
    "torch-tensorrt": {"gpu": "not installed", "gpu-sparsity-off": "not installed"},
}


def statuses(**why_not: str) -> StatusesOf:
    def of(engine: str, modes: Sequence[str]) -> list[EngineStatus]:
        whole = why_not.get(engine.replace("-", "_"))
        known = MODES[engine]
        found = {mode: whole or known.get(mode, "no") for mode in modes}
        return [
            EngineStatus(engine=engine, version="1.0", can_run=why is None, why_not=why, hint="do")
            for why in found.values()
        ]

    return of


def names(engines: tuple[str, ...] = (), baseline: str | None = None, **why_not: str) -> list[str]:
    options = CompareOptions(engines=engines, baseline=baseline)
    rows, _ = plan_variants((DENSE, SPARSE), options, statuses(**why_not))
    return [row.name for row in rows]


def test_an_engine_without_a_mode_stands_for_all_its_modes() -> None:
    assert [name for name in names(("onnxruntime",)) if "tensorrt" not in name] == [
        "dense@onnxruntime:cpu",
        "dense@onnxruntime:cpu again",
        "sparse@onnxruntime:cpu",
        "dense@onnxruntime:cuda",
        "sparse@onnxruntime:cuda",
        "dense@onnxruntime:int8",
        "dense@onnxruntime:int8 again",
        "sparse@onnxruntime:int8",
        "dense@onnxruntime:uint8",
        "sparse@onnxruntime:uint8",
    ]


def test_tensorrt_runs_dense_weights_sparse_weights_with_and_without_the_flag_and_dense_again() -> (
    None
):
    assert names(("tensorrt",)) == [
        "dense@tensorrt:gpu",
        "dense@tensorrt:gpu again",
        "sparse@tensorrt:gpu",
        "sparse@tensorrt:gpu-sparsity-off",
    ]


def test_by_default_what_can_be_deployed_runs_in_the_first_engine_that_can() -> None:
    assert names() == ["dense@tensorrt:gpu", "dense@tensorrt:gpu again", "sparse@tensorrt:gpu"]
    rows, baseline = plan_variants(
        (DENSE, SPARSE), CompareOptions(), statuses(tensorrt="no GPU was found")
    )
    assert baseline == "dense@onnxruntime:cpu"
    assert [(row.name, row.why_not) for row in rows] == [
        ("dense@tensorrt:gpu", "no GPU was found"),
        ("sparse@tensorrt:gpu", "no GPU was found"),
        ("dense@onnxruntime:cpu", None),
        ("dense@onnxruntime:cpu again", None),
        ("sparse@onnxruntime:cpu", None),
    ]


def test_by_default_the_engine_of_the_run_comes_before_others() -> None:
    options = CompareOptions()
    run_in = ("onnxruntime:cpu",)
    rows, _ = plan_variants((DENSE, SPARSE), options, statuses(), run_in)
    assert {row.engine for row in rows} == {"onnxruntime"}
    rows, _ = plan_variants((DENSE, SPARSE), options, statuses(onnxruntime="no"), run_in)
    assert [row.name for row in rows if row.why_not is None] == [
        "dense@tensorrt:gpu",
        "dense@tensorrt:gpu again",
        "sparse@tensorrt:gpu",
    ]


def test_with_variants_all_that_can_run_is_planned_and_the_rest_says_why_not_once() -> None:
    rows, baseline = plan_variants(
        (DENSE, SPARSE), CompareOptions(variants=True), statuses(tensorrt="no GPU was found")
    )
    assert baseline == "dense@onnxruntime:cpu"
    assert [(row.name, row.why_not) for row in rows if row.why_not != "no"] == [
        ("dense@tensorrt:gpu", "no GPU was found"),
        ("sparse@tensorrt:gpu-sparsity-off", "no GPU was found"),
        ("dense@onnxruntime:cpu", None),
        ("dense@onnxruntime:cpu again", None),
        ("sparse@onnxruntime:cpu", None),
        ("dense@onnxruntime:cuda", "no GPU"),
        ("dense@onnxruntime:int8", None),
        ("dense@torch:eager", None),
        ("dense@torch:compile", None),
        ("sparse@torch:semi-structured-cutlass", None),
        ("dense@torch-tensorrt:gpu", "not installed"),
        ("sparse@torch-tensorrt:gpu-sparsity-off", "not installed"),
    ]


def test_an_onnx_file_has_no_torch_rows_unless_they_are_asked_for() -> None:
    model = ComparedModel(weights="m", onnx=Path("m.onnx"))
    rows, _ = plan_variants((model,), CompareOptions(variants=True), statuses())
    assert not any(row.engine.startswith("torch") for row in rows)
    options = CompareOptions(engines=("torch:eager",))
    asked, _ = plan_variants((model,), options, statuses())
    assert [(row.name, row.why_not) for row in asked] == [
        (
            "m@torch:eager",
            "there is no torch module: compare a run folder that was made from one which can be "
            "loaded again, such as file.py:callable",
        )
    ]


def test_a_plan_alone_runs_in_tensorrt_as_it_is() -> None:
    model = ComparedModel(weights="m", plans={"gpu": Path("m.plan")})
    rows, baseline = plan_variants((model,), CompareOptions(), statuses())
    assert [row.name for row in rows] == ["m@tensorrt:gpu", "m@tensorrt:gpu again"]
    assert baseline == "m@tensorrt:gpu"


def test_the_baseline_can_be_named_and_has_the_twin() -> None:
    assert names(("onnxruntime:cpu,torch:eager",), "sparse@torch:eager") == [
        "dense@onnxruntime:cpu",
        "dense@onnxruntime:cpu again",
        "sparse@onnxruntime:cpu",
        "dense@torch:eager",
        "sparse@torch:eager",
        "sparse@torch:eager again",
    ]


@pytest.mark.parametrize(
    ("engines", "baseline", "said"),
    [
        (("tenserrt",), None, "--engines: there is no engine 'tenserrt'"),
        (("onnxruntime,",), None, "--engines: there is no engine ''"),
        (("torch:fast",), None, "--engines: torch has no mode 'fast'"),
        (("torch:eager",), "dense@torch:compile", "--baseline: there is no variant"),
    ],
)
def test_what_is_not_there_is_refused_by_name(
    engines: tuple[str, ...], baseline: str | None, said: str
) -> None:
    with pytest.raises(BadInputError) as caught:
        names(engines, baseline)
    assert caught.value.message.startswith(said)
    assert caught.value.hint


def test_engines_are_read_with_commas_and_repeats() -> None:
    assert parse_engines(["torch:eager, onnxruntime", "torch:eager"]) == (
        ("torch", "eager"),
        ("onnxruntime", None),
    )


def profile(**ms: float) -> tuple[LayerTime, ...]:
    return tuple(LayerTime(name=name, mean_ms=value) for name, value in ms.items())


def test_a_layer_has_its_median_over_the_profiles_that_all_have_it() -> None:
    slow = profile(conv=9.0, head=0.1)
    found = middle_profile([profile(conv=1.0, head=0.2), slow, profile(conv=1.1, head=0.3)])
    assert found == profile(conv=1.1, head=0.2)
    assert middle_profile([profile(conv=1.0, head=0.2), profile(conv=2.0)]) == profile(conv=1.5)
