"""A folder for trtexec: what is in it, and what its build.sh does with a trtexec that takes notes.

The trtexec here is a shell script: it writes down its arguments, one a line, and leaves the files
that it was asked for.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnx_models
import pytest
from onnx import TensorProto, helper
from typer.testing import CliRunner

from twofour.cli.app import app
from twofour.errors import BadInputError
from twofour.pipeline.emitting import emit_trtexec, is_emitted_folder, read_emitted
from twofour.pipeline.folder import MANIFEST
from twofour.records import (
    BuildOptions,
    LayerMap,
    LayerName,
    RunManifest,
    RunOptions,
    ShapeProfile,
    TrtexecFolder,
)
from twofour.store import read_record, write_record

ODD_NAMES = ("plain", "with space", 'it\'s "quoted"', "$(touch owned)`x`;#", "日本 é", "-dash")

FAKE = r"""#!/bin/sh
echo "&&&& RUNNING TensorRT.trtexec [TensorRT v$VERSION] [b11] # $0 $*"
[ "${1:-}" != --help ] || exit 0
variant=
for argument; do
    printf '%s\n' "$argument" >>"$NOTES"
    case $argument in
        --saveEngine=*) variant=${argument#--saveEngine=} variant=${variant%.plan} ;;
    esac
done
[ ! -e timing.cache ] || echo "cache found by $variant" >>"$NOTES"
: >timing.cache
if [ "$variant" = "${FAILING:-}" ]; then
    echo "[07/07/2026-02:11:09] [E] Error[2]: out of $variant memory" >&2
    exit 1
fi
echo "engine of $variant" >"$variant.plan"
"""


def model(path: Path, *, shape: Sequence[int | str] = ("batch", 8), name: str = "x") -> Path:
    """A Gemm in float16 whose weight is in a data file of its own."""
    graph = helper.make_graph(
        [helper.make_node("Gemm", [name, "w"], ["y"], name="fc", transB=1)],
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT16, list(shape))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, [None, 16])],
        [onnx_models.tensor("w", onnx_models.weights(16, 8, dtype=np.float16))],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(proto, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    return path


def emit(source: Path, folder: Path, version: str = "10.3", **build: object) -> TrtexecFolder:
    options = RunOptions(build=BuildOptions(**build))  # type: ignore[arg-type]  # by name
    return emit_trtexec(source, folder, options, version)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How build.sh ended, and what its trtexec noted."""

    code: int
    stdout: str
    stderr: str
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine with a trtexec of one version in `bin`, and a working folder elsewhere."""

    root: Path
    version: str = "100300"
    failing: str = ""
    on_path: bool = True
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, folder: Path, *arguments: str) -> Ran:
        """Run build.sh of a folder from another folder, as a user would."""
        (self.root / "bin").mkdir(exist_ok=True)
        trtexec = self.root / "bin" / "trtexec"
        trtexec.write_text(FAKE, encoding="utf-8")
        trtexec.chmod(0o755)
        notes = self.root / "notes.txt"
        notes.unlink(missing_ok=True)
        path = os.environ["PATH"]
        done = subprocess.run(
            ["sh", f"./{os.path.relpath(folder / 'build.sh', self.root)}", *arguments],
            cwd=self.root,
            env={
                "PATH": f"{self.root / 'bin'}{os.pathsep}{path}" if self.on_path else path,
                "NOTES": str(notes),
                "VERSION": self.version,
                "FAILING": self.failing,
                **self.environment,
            },
            capture_output=True,
            text=True,
            check=False,
        )
        return Ran(
            code=done.returncode,
            stdout=done.stdout,
            stderr=done.stderr,
            notes=tuple(notes.read_text(encoding="utf-8").splitlines()) if notes.exists() else (),
        )


def test_the_folder_holds_the_model_with_its_data_the_script_and_a_record(tmp_path: Path) -> None:
    source = model(tmp_path / "m.onnx")
    emitted = emit(source, tmp_path / "out")
    names = {entry.name for entry in (tmp_path / "out").iterdir()}
    assert names == {"sparse.onnx", "sparse.onnx.data", "build.sh", "README.txt", "emitted.json"}
    copied = onnx.load(tmp_path / "out" / "sparse.onnx")
    assert copied.graph.initializer[0].raw_data == onnx.load(source).graph.initializer[0].raw_data
    assert os.access(tmp_path / "out" / "build.sh", os.X_OK)
    assert is_emitted_folder(tmp_path / "out")
    assert read_record(TrtexecFolder, tmp_path / "out" / "emitted.json") == emitted
    assert (emitted.tensorrt, emitted.layer_map) == ("10.x", None)


@pytest.mark.parametrize(
    ("version", "number", "typing", "workspace", "layers"),
    [
        ("8.0", "8003", ["--fp16"], ["--workspace=4096"], False),
        ("8.5", "8510", ["--fp16"], [], True),
        ("8.6", "8601", ["--fp16"], [], True),
        ("10", "101601", ["--stronglyTyped"], [], True),
    ],
)
def test_trtexec_gets_exactly_the_arguments_of_its_version(
    *,
    tmp_path: Path,
    version: str,
    number: str,
    typing: list[str],
    workspace: list[str],
    layers: bool,
) -> None:
    emit(model(tmp_path / "m.onnx"), tmp_path / "out", version, iterations=20)
    ran = Machine(root=tmp_path, version=number).run(tmp_path / "out")
    assert ran.code == 0, ran.stderr
    information = ["--profilingVerbosity=detailed", "--exportLayerInfo={}.layers.json"]

    def expected(variant: str, sparsity: str) -> list[str]:
        arguments = [
            *("--onnx=sparse.onnx", "--saveEngine={}.plan", f"--sparsity={sparsity}", *typing),
            *("--minShapes=x:1x8", "--optShapes=x:8x8", "--maxShapes=x:8x8"),
            *workspace,
            *("--timingCacheFile=timing.cache", "--verbose", "--iterations=20"),
            *("--useCudaGraph", "--useSpinWait", "--noDataTransfers", "--separateProfileRun"),
            *(information if layers else []),
            *("--dumpProfile", "--exportProfile={}.profile.json", "--exportTimes={}.times.json"),
        ]
        return [argument.format(variant) for argument in arguments]

    assert list(ran.notes) == [
        *expected("sparse", "enable"),
        *expected("dense", "disable"),
        "cache found by dense",
    ]


def test_a_second_build_starts_with_an_empty_timing_cache(tmp_path: Path) -> None:
    emit(model(tmp_path / "m.onnx"), tmp_path / "out")
    machine = Machine(root=tmp_path)
    machine.run(tmp_path / "out")
    assert [n for n in machine.run(tmp_path / "out").notes if "cache found" in n] == [
        "cache found by dense"
    ]


def test_arguments_of_the_script_reach_every_trtexec_unchanged(tmp_path: Path) -> None:
    emit(model(tmp_path / "m.onnx"), tmp_path / "out")
    ran = Machine(root=tmp_path).run(tmp_path / "out", "--plugins=a b.so", "--device=1")
    assert ran.notes.count("--plugins=a b.so") == ran.notes.count("--device=1") == 2


@pytest.mark.parametrize("odd", ODD_NAMES)
def test_odd_names_of_folders_and_inputs_come_through_whole(tmp_path: Path, odd: str) -> None:
    tensor = odd.replace("'", "")
    root = tmp_path / odd
    root.mkdir()
    emit(model(root / "m.onnx", name=tensor), root / f"{odd} out")
    ran = Machine(root=root).run(root / f"{odd} out")
    assert ran.code == 0, ran.stderr
    assert ran.notes.count(f"--optShapes={tensor}:8x8") == 2
    assert (root / f"{odd} out" / "sparse.plan").read_text() == "engine of sparse\n"
    assert not list(tmp_path.rglob("owned"))


def test_each_engine_has_a_log_with_both_streams_of_trtexec(tmp_path: Path) -> None:
    emit(model(tmp_path / "m.onnx"), tmp_path / "out")
    Machine(root=tmp_path, failing="dense").run(tmp_path / "out")
    log = (tmp_path / "out" / "dense.log").read_text()
    assert log.startswith("&&&& RUNNING TensorRT.trtexec [TensorRT v100300]")
    assert "out of dense memory" in log


def test_an_engine_that_fails_is_named_and_the_other_one_is_built(tmp_path: Path) -> None:
    emit(model(tmp_path / "m.onnx"), tmp_path / "out")
    machine = Machine(root=tmp_path)
    machine.run(tmp_path / "out")
    ran = Machine(root=tmp_path, failing="sparse").run(tmp_path / "out")
    assert ran.code == 5
    assert "sparse: failed\n    [07/07/2026-02:11:09] [E] Error[2]: out of" in ran.stderr
    assert "build.sh: failed: sparse" in ran.stderr
    assert (tmp_path / "out" / "failed.txt").read_text() == "sparse\n"
    left = {entry.name for entry in (tmp_path / "out").glob("*.plan")}
    assert left == {"dense.plan"}, "the plan of the first build is not taken for that of the second"


@pytest.mark.parametrize(
    ("emitted_for", "number", "found"),
    [
        ("10.3", "8602", "8.6"),
        ("8.6", "101601", "10.16"),
        ("8.4", "8601", "8.6"),
        ("8.6", "8510", "8.5"),
        ("11", "100300", "10.3"),
        ("10", "110100", "11.1"),
    ],
)
def test_a_trtexec_of_another_version_is_refused_before_it_builds(
    tmp_path: Path, emitted_for: str, number: str, found: str
) -> None:
    emit(model(tmp_path / "m.onnx"), tmp_path / "out", emitted_for)
    ran = Machine(root=tmp_path, version=number).run(tmp_path / "out")
    assert (ran.code, ran.notes) == (2, ())
    assert f"is of TensorRT {found}, these commands are for" in ran.stderr
    assert f"--tensorrt-version {found}" in ran.stderr


def test_a_trtexec_that_does_not_say_its_version_is_refused_with_its_own_words(
    tmp_path: Path,
) -> None:
    emit(model(tmp_path / "m.onnx"), tmp_path / "out")
    ran = Machine(root=tmp_path, version="").run(tmp_path / "out")
    assert (ran.code, ran.notes) == (2, ())
    assert "does not say its version" in ran.stderr
    assert "&&&& RUNNING TensorRT.trtexec" in ran.stderr


def test_a_machine_without_trtexec_is_told_where_it_was_looked_for(tmp_path: Path) -> None:
    emit(model(tmp_path / "m.onnx"), tmp_path / "out")
    ran = Machine(root=tmp_path, on_path=False).run(tmp_path / "out")
    assert ran.code == 3
    assert "there is no /usr/src/tensorrt/bin/trtexec" in ran.stderr
    assert "TRTEXEC=/path/to/trtexec" in ran.stderr


@pytest.mark.parametrize("absolute", [True, False])
def test_trtexec_can_be_named_relative_to_where_the_user_is(tmp_path: Path, absolute: bool) -> None:
    emit(model(tmp_path / "m.onnx"), tmp_path / "out")
    named = str(tmp_path / "bin" / "trtexec") if absolute else "bin/trtexec"
    machine = Machine(root=tmp_path, on_path=False, environment={"TRTEXEC": named})
    ran = machine.run(tmp_path / "out")
    assert ran.code == 0, ran.stderr
    assert (tmp_path / "out" / "dense.plan").is_file()


def test_a_folder_copied_without_the_model_is_refused(tmp_path: Path) -> None:
    emit(model(tmp_path / "m.onnx"), tmp_path / "out")
    (tmp_path / "out" / "sparse.onnx").unlink()
    ran = Machine(root=tmp_path).run(tmp_path / "out")
    assert ran.code == 2
    assert "copy the whole folder" in ran.stderr


def test_shapes_are_those_asked_for_then_those_of_examples_then_a_batch_of_1_to_8(
    tmp_path: Path,
) -> None:
    source = model(tmp_path / "m.onnx", shape=["batch", 8])
    asked = ShapeProfile(input="x", min=(2, 8), opt=(4, 8), max=(6, 8))
    assert emit(source, tmp_path / "a", shapes=(asked,)).options.shapes == (asked,)
    by_example = emit_trtexec(source, tmp_path / "b", RunOptions(input_shapes=((5, 8),)), "10")
    assert by_example.options.shapes == (
        ShapeProfile(input="x", min=(1, 8), opt=(5, 8), max=(5, 8)),
    )
    assert emit(source, tmp_path / "c").options.shapes == (
        ShapeProfile(input="x", min=(1, 8), opt=(8, 8), max=(8, 8)),
    )


def test_a_model_with_fixed_shapes_needs_no_profile(tmp_path: Path) -> None:
    emitted = emit(model(tmp_path / "m.onnx", shape=[2, 8]), tmp_path / "out")
    assert emitted.options.shapes == ()
    assert not [a for v in emitted.variants for a in v.arguments if "Shapes" in a]


@pytest.mark.parametrize("shape", [["batch", "width"], [4, "width"]])
def test_another_dynamic_dimension_is_never_guessed(
    tmp_path: Path, shape: Sequence[int | str]
) -> None:
    source = model(tmp_path / "m.onnx", shape=shape)
    with pytest.raises(BadInputError, match="dynamic in more than its first") as error:
        emit(source, tmp_path / "out")
    assert "--shapes x=min:opt:max" in (error.value.hint or "")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sparse.onnx").write_text("mine")
    with pytest.raises(BadInputError, match="is not empty"):
        emit(model(tmp_path / "m.onnx"), tmp_path / "out")
    assert (tmp_path / "out" / "sparse.onnx").read_text() == "mine"


def test_nothing_is_left_in_the_folder_where_writing_it_fails(tmp_path: Path) -> None:
    source = model(tmp_path / "m.onnx")
    write_record(tmp_path / MANIFEST, RunManifest(source="m", twofour_version="0", stages=()))
    (tmp_path / "layers.json").write_text("damaged")
    with pytest.raises(BadInputError, match=r"layers\.json"):
        emit(source, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_names_of_modules_come_along_from_a_run_folder(tmp_path: Path) -> None:
    source = model(tmp_path / "sparse.onnx")
    row = LayerName(layer="head", parameter="head.weight", node="fc", initializer="w", op="Gemm")
    write_record(tmp_path / "layers.json", LayerMap(layers=(row,)))
    assert emit(source, tmp_path / "a").layer_map is None, "that layers.json is no run's"
    manifest = RunManifest(source="m", twofour_version="0", stages=())
    write_record(tmp_path / MANIFEST, manifest)
    assert emit(source, tmp_path / "b").layer_map == "layers.json"
    assert read_record(LayerMap, tmp_path / "b" / "layers.json").layers == (row,)


def test_a_folder_nothing_was_built_in_says_what_to_run_where(tmp_path: Path) -> None:
    emitted = emit(model(tmp_path / "m.onnx"), tmp_path / "out", "8.4")
    with pytest.raises(BadInputError, match=r"holds no sparse\.log") as error:
        read_emitted(tmp_path / "out")
    assert "build.sh" in (error.value.hint or "")
    assert "TensorRT 8.4 or 8.5" in (error.value.hint or "")
    Machine(root=tmp_path, version="8401").run(tmp_path / "out")
    assert read_emitted(tmp_path / "out") == emitted


def test_the_command_line_writes_the_folder_and_says_how_to_go_on(tmp_path: Path) -> None:
    source = model(tmp_path / "m.onnx")
    out = tmp_path / "out"
    arguments = ["build", str(source), "--emit-trtexec", str(out), "--engine", "onnxruntime"]
    result = CliRunner().invoke(app, [*arguments, "--tensorrt-version", "8.6", "--opt-level", "4"])
    assert result.exit_code == 0, result.output
    assert "--engine and --out are not used" in result.stderr
    assert f"twofour report {out}" in result.stdout
    assert "--builderOptimizationLevel=4" in shlex.split((out / "build.sh").read_text())
    assert not (tmp_path / "runs").exists()


def test_the_command_line_prints_the_record_alone_with_json(tmp_path: Path) -> None:
    source = model(tmp_path / "m.onnx")
    result = CliRunner().invoke(
        app, ["build", str(source), "--emit-trtexec", str(tmp_path / "out"), "--json"]
    )
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["tensorrt"] == "10.x"
    assert [v["variant"] for v in printed["variants"]] == ["sparse", "dense"]
