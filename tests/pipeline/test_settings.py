"""Options are resolved once, before the first stage; each of them changes something that shows."""

import shutil
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.onnx_models import model, save, two_weights, weights
from support.small_run import MODEL, Recorder

from twofour.errors import BadInputError
from twofour.jobs import open_run, run_all, run_build, run_export, run_prune, run_stages
from twofour.pipeline.onnx.model import OnnxModel
from twofour.pipeline.stages import R, Runner, Settings, Silent, Stage, resolve_options
from twofour.pipeline.torch.model import TorchModel
from twofour.records.export import EngineStatus
from twofour.records.options import (
    AllowedType,
    BuildOptions,
    CalibrationOptions,
    CompareOptions,
    DynamicAxis,
    ExampleInputs,
    MethodOptions,
    Precision,
    RunOptions,
    ShapeProfile,
)
from twofour.records.run import BuildResult, VariantCheck
from twofour.records.weights import Pattern, Selection
from twofour.sources.callable import CallableSource
from twofour.sources.source import OnnxSource
from twofour.sources.user_code import parse_reference
from twofour.store import read_record

ORT = RunOptions(engine="onnxruntime")
CODE = CallableSource(text=MODEL, reference=parse_reference(MODEL), options=ExampleInputs())
PROFILE = ShapeProfile(input="x", min=(1, 8, 6, 6), opt=(4, 8, 6, 6), max=(8, 8, 6, 6))
METRIC = "import numpy as np\n\ndef drawn(predict):\n    return float(np.random.rand())\n"

FIRST_DONE_AGAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "pattern": ("prune", {"pattern": Pattern(1, 4)}),
    "selection.include": ("prune", {"selection": Selection(include=("fc",))}),
    "selection.exclude": ("prune", {"selection": Selection(exclude=("fc",))}),
    "selection.all_layers": ("prune", {"selection": Selection(all_layers=True)}),
    "method": ("prune", {"method": MethodOptions(name="magnitude")}),
    "calibration": ("inputs", {"calibration": CalibrationOptions(data="inputs.npz")}),
    "precision": ("export-dense", {"precision": Precision.FLOAT32}),
    "inputs": ("inputs", {"inputs": "inputs.npz"}),
    "input_shapes": ("inputs", {"input_shapes": ((4, 8, 6, 6),)}),
    "dense_reference": ("inputs", {"dense_reference": "other.onnx"}),
    "metric": ("check-dense", {"metric": "metric.py:drawn"}),
    "seed": ("inputs", {"seed": 1}),
    "engine": ("build-dense", {"engine": "auto"}),
    "build.shapes": ("inputs", {"build": BuildOptions(shapes=(PROFILE,))}),
    "build.workspace_bytes": ("build-dense", {"build": BuildOptions(workspace_bytes=1 << 20)}),
    "build.optimization_level": ("build-dense", {"build": BuildOptions(optimization_level=1)}),
    "build.tf32": ("build-dense", {"build": BuildOptions(tf32=False)}),
    "build.allow": ("export-dense", {"build": BuildOptions(allow=(AllowedType.FP16,))}),
    "build.iterations": ("times", {"build": BuildOptions(iterations=3)}),
    "build.warmup": ("times", {"build": BuildOptions(warmup=0)}),
    "build.threads": ("check-dense", {"build": BuildOptions(threads=1)}),
}
"""Option -> the first stage that is done again when it changes, in a run of an ONNX file."""
IN_OTHER_TESTS = {"keep_float32", "input_shape_names", "opset", "dynamic_batch", "dynamic"} | {
    "stream", "budget", "quantize", "gpu", "side_by_side", "selection.said_by",
    "training", "trust", "resume",
}  # fmt: skip
"""They need another option beside them, a torch model, or a command of their own."""


def options_by_name() -> Iterator[str]:
    """Every field of RunOptions; those of a record inside it by `outer.inner`."""
    for field in fields(RunOptions):
        inner = {"selection": Selection, "build": BuildOptions}.get(field.name)
        if inner is None:
            yield field.name
        else:
            yield from (f"{field.name}.{each.name}" for each in fields(inner))


def free_batch() -> onnx.ModelProto:
    made = two_weights()
    made.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, another one of its kind, a metric, example inputs, and a finished run in `r`."""
    path = tmp_path_factory.mktemp("options")
    save(free_batch(), path / "model.onnx")
    other = free_batch()
    other.graph.initializer[0].raw_data = bytes(len(other.graph.initializer[0].raw_data))
    save(other, path / "other.onnx")
    (path / "metric.py").write_text(METRIC)
    np.savez(path / "inputs.npz", x=np.ones((3, 8, 6, 6), np.float32))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        run_all("model.onnx", path / "r", ORT)
    return path


class DoneError(Exception):
    """Ends a run: a stage was done that was done before."""


class FirstStage(Silent):
    """Ends the run after the first stage that is not kept."""

    def done(self, name: str, *, seconds: float) -> None:  # noqa: ARG002  # Protocol
        """The name is all that is asked for."""
        raise DoneError(name)


def first_done_again(run: Path, changed: RunOptions) -> str | None:
    """The stage that a copy of a finished run does first under other options; None: none."""
    copy = Path(shutil.copytree(run, run.with_name("copy"), dirs_exist_ok=True))
    try:
        run_all("model.onnx", copy, replace(changed, resume=True), FirstStage())
    except DoneError as error:
        return str(error)
    finally:
        shutil.rmtree(copy)
    return None


def test_the_walk_below_has_every_option() -> None:
    assert set(options_by_name()) == FIRST_DONE_AGAIN.keys() | IN_OTHER_TESTS


@pytest.mark.parametrize("option", FIRST_DONE_AGAIN)
def test_each_option_makes_a_stage_be_done_again(
    folder: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    stage, change = FIRST_DONE_AGAIN[option]
    assert first_done_again(folder / "r", replace(ORT, **change)) == stage


@pytest.mark.parametrize(
    ("base", "again"),
    [
        ({}, ("original", {"keep_float32": ("fc",)})),
        ({"input_shapes": ((4, 8, 6, 6),)}, ("inputs", {"input_shape_names": ("x",)})),
    ],
)
def test_what_is_said_beside_another_option_makes_a_stage_be_done_again(
    folder: Path,
    base: dict[str, Any],
    again: tuple[str, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    run_all("model.onnx", tmp_path / "r", replace(ORT, **base))
    assert first_done_again(tmp_path / "r", replace(ORT, **base)) is None
    stage, change = again
    assert first_done_again(tmp_path / "r", replace(ORT, **base, **change)) == stage


def test_what_only_torch_models_take_makes_the_export_be_done_again(tmp_path: Path) -> None:
    recorder = Recorder()
    for options in (
        RunOptions(opset=19),
        RunOptions(dynamic_batch=False),
        RunOptions(dynamic=(DynamicAxis(input="x", axis=2, name="height"),)),
    ):
        run_export(MODEL, tmp_path / "r", replace(options, resume=True), recorder)
    assert recorder.did.count("export-dense") == 3


def test_another_seed_runs_the_metric_again_on_the_same_example_inputs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    base = replace(ORT, metric="metric.py:drawn", inputs="inputs.npz")
    drawn = []
    for seed in (0, 1):
        run_all("model.onnx", tmp_path / "r", replace(base, seed=seed))
        record = read_record(VariantCheck, tmp_path / "r/stages/check-dense.json")
        drawn.append(record.metrics["drawn"])
    assert drawn == pytest.approx([0.5488135, 0.4170220])


def test_profiles_that_follow_from_the_file_stand_in_the_record_of_the_build(
    tmp_path: Path,
) -> None:
    node = onnx.helper.make_node("Gemm", ["x", "w", "z"], ["y"], name="fc")
    sizes: dict[str, list[int | str]] = {"x": ["n", 8], "z": ["n", 16]}
    save(model([node], {"w": weights(8, 16)}, inputs=sizes), tmp_path / "two.onnx")
    asked = ShapeProfile(input="x", min=(1, 8), opt=(4, 8), max=(8, 8))
    options = replace(ORT, build=BuildOptions(shapes=(asked,)))
    run_build(tmp_path / "two.onnx", tmp_path / "r", options)
    record = read_record(BuildResult, tmp_path / "r/build.json")
    follows = ShapeProfile(input="z", min=(1, 16), opt=(4, 16), max=(8, 16))
    assert record.options.shapes == (asked, follows)


@pytest.mark.parametrize(
    ("version", "asked", "opset"),
    [
        ("8.6.1", RunOptions(), 17),
        ("10.3.0", RunOptions(), None),
        ("8.6.1", RunOptions(opset=20), 20),
        ("8.6.1", RunOptions(precision=Precision.BFLOAT16), None),
    ],
)
def test_an_opset_nobody_asked_for_is_one_that_the_engine_reads(
    version: str, asked: RunOptions, opset: int | None
) -> None:
    status = EngineStatus(engine="tensorrt", version=version, can_run=True, why_not=None)
    found = resolve_options(asked, TorchModel(CODE, print), lambda _: status, print)
    assert found.opset == opset
    assert found.builder.engine == "tensorrt"


def test_the_precision_that_nobody_asked_for_is_the_sources(folder: Path) -> None:
    module = TorchModel(CODE, print)
    file = OnnxModel(OnnxSource(text="m", path=folder / "model.onnx", options=ExampleInputs()))
    assert resolve_options(RunOptions(), module, None, print).precision is Precision.FLOAT16
    assert resolve_options(RunOptions(), file, None, print).precision is Precision.FLOAT16


class Watched(Settings):
    """Settings that note which of their fields are read."""

    def __getattribute__(self, name: str) -> object:
        if not name.startswith("_"):
            READ.add(name)
        return super().__getattribute__(name)


READ: set[str] = set()


class WatchingRunner(Runner):
    """Notes what a stage's work reads of the settings and its description did not."""

    def run(self, stage: Stage[R]) -> R:
        """As usual."""
        described = {*READ}
        READ.clear()
        record = super().run(stage)
        UNNAMED[stage.name] = (READ - described) & {f.name for f in fields(Settings)}
        READ.clear()
        return record


UNNAMED: dict[str, set[str]] = {}


@pytest.mark.parametrize("is_torch", [False, True])
def test_a_stage_goes_by_the_options_that_it_names(
    is_torch: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    UNNAMED.clear()
    options = replace(ORT, metric="metric.py:drawn", precision=Precision.FLOAT32)
    model = MODEL if is_torch else "model.onnx"
    with open_run(model, tmp_path / "r", options, Silent(), builds=True) as run:
        known = {f.name: getattr(run.options, f.name) for f in fields(Settings)}
        runner = WatchingRunner(run.runner.folder, run.progress)
        run_stages(replace(run, options=Watched(**known), runner=runner))
    assert len(UNNAMED) >= 12
    assert {name: unnamed for name, unnamed in UNNAMED.items() if unnamed} == {}


@pytest.mark.parametrize("kind", [ExampleInputs, RunOptions, CompareOptions])
def test_example_inputs_and_shapes_for_them_exclude_each_other(kind: type[ExampleInputs]) -> None:
    with pytest.raises(BadInputError, match="--inputs and --input-shape"):
        kind(inputs="x.npz", input_shapes=((4, 8, 6, 6),))


# --- without calibration data ---------------------------------------------------------------------


# --- without calibration data ---------------------------------------------------------------------


def test_what_is_lost_without_data_is_one_note_unless_the_model_came_pruned(tmp_path: Path) -> None:
    source = str(save(two_weights(), tmp_path / "model.onnx"))
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(300, 8, 6, 6)))
    calibration = CalibrationOptions(data=str(tmp_path / "x.npy"))
    without, pruned, with_data = Recorder(), Recorder(), Recorder()
    run_prune(source, tmp_path / "r", RunOptions(), without)
    run_prune(str(tmp_path / "r" / "sparse.onnx"), tmp_path / "s", RunOptions(), pruned)
    run_prune(source, tmp_path / "t", RunOptions(calibration=calibration), with_data)
    (note,) = without.notes
    assert note.startswith("2 weights pruned by magnitude, without calibration samples.")
    assert "`--calibrate DATA`" in note
    assert [note for note in pruned.notes if "without cal" in note] == with_data.notes == []


@pytest.mark.parametrize(
    "changed",
    [{"image_mean": (0.5,)}, {"image_std": (0.5,)}, {"image_size": (8, 8)}, {"samples": 8}],
)
def test_what_says_how_data_are_read_is_refused_without_data(
    folder: Path, tmp_path: Path, changed: dict[str, Any]
) -> None:
    options = RunOptions(calibration=replace(CalibrationOptions(), **changed))
    with pytest.raises(BadInputError, match=r"--(mean|std|size|calibrate-samples) needs"):
        run_prune(str(folder / "model.onnx"), tmp_path / "r", options)
