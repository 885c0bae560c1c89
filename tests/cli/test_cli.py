"""The commands as a user meets them: exit codes, streams, and messages without tracebacks."""

import errno
import json
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import typer
from onnx import TensorProto, helper
from support import onnx_models as om
from support.unlucky import at_change, full_from
from typer.main import get_command
from typer.testing import CliRunner, Result

from twofour.cli import application
from twofour.cli.console import guarded

MODEL = Path(__file__).parents[1] / "support" / "small_model.py"


def invoke(*arguments: str | Path, **env: str) -> Result:
    """Run a command in this process; stdout and stderr apart."""
    return CliRunner().invoke(application(), [str(a) for a in arguments], env=env)


def ended_by(error: BaseException) -> Result:
    """The end of a command that raises this."""
    app = typer.Typer()

    @app.command()
    @guarded
    def command() -> None:
        raise error

    return CliRunner().invoke(app, [])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small ONNX file with one dense Gemm."""
    ends = ("batch", 16), ("batch", 64)
    return om.one_layer(tmp_path / "fc.onnx", "Gemm", om.weights(64, 16), ends, transB=1)


def test_the_main_job_shows_the_verdicts_and_where_everything_is(folder: Path) -> None:
    result = invoke("prune-export-build", f"{MODEL}:make", "--out", folder)
    assert "Worth shipping: not known" in result.stdout
    assert result.exit_code == 0
    assert "GROUPED_CONV" in result.stdout
    assert "eligible: can run sparse" in result.stdout
    assert f"Results: {folder}" in result.stderr
    assert f"Next: `twofour build {folder}/sparse.onnx --emit-trtexec FOLDER`" in result.stderr
    assert f"`twofour compare {folder}` times both" in result.stderr


def test_what_is_not_worth_shipping_is_neither_built_nor_compared_next(
    folder: Path, tmp_path: Path
) -> None:
    small = f"{MODEL}:make"
    slow = invoke("prune-export-build", small, "--out", folder, "--resume", "--gpu", "A100")
    assert "Not worth shipping on A100" in slow.stdout
    options = f"{small} --options {folder}/options.toml"
    assert f"Next: `twofour forecast {options} --gpu all` shows" in slow.stderr
    ends = ("batch", 32), ("batch", 64)
    equal = np.full((64, 32), 0.5, np.float32)  # whatever goes, half of the output goes
    lossy = om.one_layer(tmp_path / "fc.onnx", "Gemm", equal, ends, transB=1)
    lost = invoke("prune-export-build", lossy, "--out", tmp_path / "run")
    assert "Not worth shipping as" in lost.stdout
    assert "on random inputs" in lost.stdout
    options = f"{lossy} --options {tmp_path}/run/options.toml --out {tmp_path}/run --resume"
    assert f"Next: `twofour prune-export-build {options} --calibrate DATA` keeps" in lost.stderr
    for result in (slow, lost):
        next_line = result.stderr.partition("Next: ")[2]
        assert "twofour build" not in next_line
        assert "twofour compare" not in next_line
    judged = invoke("sensitivity", lossy, "--out", tmp_path / "study")
    assert "adding `--calibrate DATA`" in judged.stderr
    assert "pruned by magnitude" in judged.stdout


def test_json_is_the_only_thing_on_stdout(folder: Path) -> None:
    for command in (
        ["prune-export-build", f"{MODEL}:make", "--out", folder],
        ["validate", folder],
        ["report", folder],
        ["doctor"],
    ):
        result = invoke(*command, "--json")
        assert result.exit_code == 0
        assert isinstance(json.loads(result.stdout), dict)


def test_quiet_leaves_stderr_empty(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = MODEL.read_text() + (
        "import os, sys\nprint('1')\nsys.stderr.write('2')\nos.write(2, b'3')\n"
    )
    (tmp_path / "loud.py").write_text(source)
    result = invoke("prune", f"{tmp_path / 'loud.py'}:make", "--out", tmp_path / "r", "--quiet")
    assert (result.exit_code, result.stderr, capfd.readouterr().err) == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["prune"], "Missing argument 'MODEL'\nhint: see twofour prune --help"),
        (["prun"], "No such command 'prun'. Did you mean 'prune'?\nhint: see twofour --help"),
        (["--nope"], "No such option: --nope\nhint: see twofour --help"),
        (["compare", "nope.onnx"], "cannot read nope.onnx: no such file\nhint: name a run folder"),
        (["log", "nope"], "cannot read nope: No such file or directory\nhint: name a build log"),
    ],
)
def test_each_error_is_one_line_and_one_hint(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(application(), arguments, prog_name="twofour")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {said}")
    assert result.stderr.count("\n") == 2


def test_validate_exits_4_and_names_the_broken_layer(folder: Path) -> None:
    for path in (folder, folder / "sparse.onnx", folder / "weights.safetensors"):
        assert invoke("validate", path).exit_code == 0
    result = invoke("validate", folder / "dense.onnx")
    assert result.exit_code == 4
    assert "body" in result.stdout
    assert "broken" in result.stdout
    assert "broken in 2 weights" in result.stderr
    assert "hint: prune the model" in result.stderr


def test_the_command_after_prune_keeps_the_options_that_pruned(tmp_path: Path) -> None:
    data = tmp_path / "data.npz"
    np.savez(data, x=np.random.default_rng(0).normal(size=(8, 3, 8, 8)).astype(np.float32))
    folder = tmp_path / "r"
    calibrated = ("--calibrate", data, "--exclude", "head*")
    result = invoke("prune", f"{MODEL}:make", "--out", folder, *calibrated)
    assert result.exit_code == 0
    command = re.search(r"Next: `twofour (.+?)`", result.stderr)
    assert command is not None
    weights = (folder / "weights.safetensors").read_bytes()
    following = invoke(*shlex.split(command[1]))
    assert re.search(r"kept: .*prune", following.stderr)
    assert (folder / "weights.safetensors").read_bytes() == weights

    # a person who leaves the options out is told that the calibrated weights go
    anew = invoke("prune", f"{MODEL}:make", "--out", folder, "--resume")
    assert "prune is done again: an option, the model or a package is not as before" in anew.stderr


def test_prune_build_and_report_take_an_onnx_file(model: Path, tmp_path: Path) -> None:
    assert invoke("validate", model).exit_code == 4
    assert invoke("prune", model, "--out", tmp_path / "p").exit_code == 0
    sparse = tmp_path / "p" / "sparse.onnx"
    assert invoke("validate", sparse).exit_code == 0
    built = invoke("build", sparse, "--out", tmp_path / "b", "--json", "--engine", "onnxruntime")
    assert [v["variant"] for v in json.loads(built.stdout)["variants"]] == ["sparse"]
    wide = invoke("report", "--onnx", sparse, COLUMNS="200").stdout
    assert max(map(len, wide.splitlines())) > 120
    report = json.loads(invoke("report", "--onnx", sparse, "--json").stdout)
    assert [v["verdict"] for v in report["verdicts"]] == ["eligible"]


def test_a_file_that_is_not_pruned_is_not_built_as_sparse(model: Path, tmp_path: Path) -> None:
    said = f"{model} is dense: no weight in it is 2:4, so no sparse kernel can run. Prune it first"
    built = invoke("build", model, "--out", tmp_path / "b", "--json", "--engine", "onnxruntime")
    found = json.loads(built.stdout)
    assert [v["variant"] for v in found["variants"]] == ["dense"]
    assert found["notes"][0].startswith(said)
    emitted = invoke("build", model, "--emit-trtexec", tmp_path / "e", "--input-shape", "x=4x16")
    assert f"note: {said}" in emitted.stderr


def test_a_build_whose_only_engine_cannot_run_ends_in_5_after_its_table(tmp_path: Path) -> None:
    node = helper.make_node("Gather", ["table", "ids"], ["y"])
    made = om.model([node], {"table": om.weights(4, 16)}, inputs={"ids": ["n"]})
    made.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    path = om.save(made, tmp_path / "gather.onnx")
    np.savez(tmp_path / "ids.npz", ids=np.array([9]))
    arguments = ("build", path, "--inputs", tmp_path / "ids.npz", "--out", tmp_path / "b")
    result = invoke(*arguments, "--engine", "onnxruntime")
    assert result.exit_code == 5
    assert "out of data bounds" in result.stderr
    assert "Not measured" in result.stdout
    assert "dense@onnxruntime:cpu" in result.stdout
    assert "during the rounds" not in result.stdout, "there were none"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["prune", "missing.onnx"], "missing.onnx"),
        (["prune", "{fc}", "--exclude", "*", "--out", "p"], "is pruned: EXCLUDED 1"),
        (["validate", "{tmp}/text.txt"], "cannot be checked"),
        (["validate", "{tmp}/garbage.onnx"], "not an ONNX model"),
        (["prune-export-build", "{tmp}/raises.py:make"], "ZeroDivisionError"),
        (["prune-export-build", "{model}:make", "--pattern", "4:4"], "4:4 is not an N:M pattern"),
        (["prune-export-build", "{model}:make", "--shapes", "y=1x3x8x8"], "no input 'y'"),
        (["prune-export-build", "{model}:make", "--out", "{tmp}"], "not a run folder"),
        (["report", "--log", "a.log", "--log", "b.log"], "--log was given twice"),
        (["report", "{tmp}"], "not a run folder"),
        (["explain", "{tmp}"], "hint: twofour explain LAYER {tmp}"),
        (["explain", "{tmp}", "fc"], "hint: twofour explain fc {tmp}"),
        (["build", "{tmp}/text.txt"], "not an .onnx file"),
    ],
)
def test_bad_input_is_a_clear_error_and_exit_2(
    arguments: Sequence[str],
    words: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "garbage.onnx").write_bytes(bytes(range(256)) * 8)
    (tmp_path / "raises.py").write_text("def make():\n    return 1 / 0\n")
    names = [a.format(tmp=tmp_path, model=MODEL, fc=model) for a in arguments]
    result = invoke(*names)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words.format(tmp=tmp_path) in result.stderr
    assert any(line.startswith("error: ") for line in result.stderr.splitlines())
    assert "Traceback" not in result.stderr


def test_doctor_names_the_engines_the_gpu_and_runtimes_without_2_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tmp_path / "vllm-0.20.0.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.20.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    result = invoke("doctor")
    assert "note: vLLM 0.19 and" in result.stdout
    assert result.exit_code == 0
    assert "engine onnxruntime" in result.stdout
    assert "can run here" in result.stdout
    assert "GPU: " in result.stdout


def test_every_command_has_help_with_an_example() -> None:
    commands = get_command(application()).commands  # type: ignore[attr-defined]  # a group
    for name in commands:
        result = invoke(str(name), "--help")
        assert result.exit_code == 0
        assert "Example: " in result.stdout
        assert "twofour" in result.stdout.partition("Example: ")[2]


def test_a_bug_of_ours_is_exit_1_with_a_saved_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twofour.cli.console._traceback_folder", tmp_path)
    result = ended_by(AssertionError("verdict_note"))
    assert result.exit_code == 1
    assert "verdict_note" in result.stderr
    (saved,) = tmp_path.glob("twofour-*-traceback.txt")
    assert "AssertionError: verdict_note" in saved.read_text()


def test_a_traceback_for_which_no_disk_has_room_is_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twofour.cli.console._traceback_folder", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with at_change(tmp_path, full_from(0)):
        result = ended_by(AssertionError("verdict_note"))
    assert result.exit_code == 1
    assert "AssertionError: verdict_note" in result.stderr
    assert "in command" in result.stderr
    assert "is a bug in" in result.stderr
    assert "the traceback is above" in result.stderr


def test_a_full_disk_is_no_bug_and_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twofour.cli.console._traceback_folder", tmp_path)
    result = ended_by(OSError(errno.ENOSPC, "No space left on device"))
    assert result.exit_code == 2
    assert f"No space left on device: {tmp_path}" in result.stderr
    assert "the same command again" in result.stderr
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("is_kept", [True, False])
def test_ctrl_c_is_exit_130(is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twofour.cli.console._traceback_folder", tmp_path if is_kept else None)
    result = ended_by(KeyboardInterrupt())
    assert result.exit_code == 130
    again = ": the same command with --resume continues" if is_kept else ""
    assert result.stderr == f"interrupted{again}\n"


def test_no_colour_and_no_progress_reach_a_pipe(folder: Path) -> None:
    command = [sys.executable, "-m", "twofour", "report", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "\x1b" not in done.stdout
    assert done.stderr == ""
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_help_imports_no_torch_and_answers_at_once() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['twofour', '--help']\n"
        "from twofour.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'onnx', 'onnxruntime', 'numpy', 'pydantic'} & set(sys.modules)\n"
        "sys.stderr.write(','.join(sorted(heavy)))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stderr == ""
    # 0.35 s; of the processor, as tests run side by side
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 1.0
