"""Every option of the commands that run stages reaches the pipeline, or shows in what is said."""

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from support.onnx_models import save, two_weights
from typer.testing import CliRunner

from twofour.cli import application
from twofour.errors import TwofourError
from twofour.pruning.methods import METHODS
from twofour.records.options import DynamicAxis, Quantization, RunOptions, ShapeProfile
from twofour.records.weights import Pattern, Selection
from twofour.sources.calibration.kinds import KINDS
from twofour.sources.source import FORMS
from twofour.store import read_options, write_options

SHAPE = "1x8x6x6"
ONCE: dict[str, list[str]] = {
    "--options": ["run.toml"],
    "--pattern": ["1:4"],
    "--all-layers": [],
    "--include": ["*"],
    "--exclude": ["*"],
    "--calibrate": ["x.npz"],
    "--calibrate-samples": ["32"],
    "--mean": ["0.5"],
    "--std": ["0.5,0.4,0.5"],
    "--size": ["224"],
    "--method": ["wanda"],
    "--refit": ["0"],
    "--damping": ["0.1"],
    "--layers": ["layers.txt"],
    "--max-drop": ["accuracy=0.5"],
    "--budget": ["0.8"],
    "--lower-is-better": [],
    "--loss": ["outputs"],
    "--profile": ["times.csv"],
    "--siblings": [],
    "--jobs": ["3"],
    "--ray": ["auto"],
    "--precision": ["float16"],
    "--keep-float32": ["*"],
    "--opset": ["19"],
    "--static-batch": [],
    "--dynamic": ["x:2=height"],
    "--inputs": ["x.npz"],
    "--input-shape": [SHAPE],
    "--dense-reference": ["other.onnx"],
    "--quantize": ["int8"],
    "--gpu": ["A100"],
    "--metric": ["metric.py:f"],
    "--source": ["model.py:make"],
    "--trust": [],
    "--no-stream": [],
    "--seed": ["1"],
    "--resume": [],
    "--engine": ["onnxruntime"],
    "--train": ["data.py:batches"],
    "--minutes": ["5"],
    "--shapes": [f"x={SHAPE}:{SHAPE}:{SHAPE}"],
    "--workspace": ["64"],
    "--opt-level": ["1"],
    "--no-tf32": [],
    "--fp16": [],
    "--int8": [],
    "--bf16": [],
}
"""Option -> its value, all other than the defaults."""
SAID_ELSEWHERE = {
    *("--out", "--json", "--quiet", "--save-options", "--emit-trtexec", "--tensorrt-version")
}
"""Where it goes and what is said of it: tests below, and those of the command line."""
COMMANDS = {
    "prune-export-build": "run_all",
    "prune": "run_prune",
    "sensitivity": "run_sensitivity",
    "finetune": "run_finetune",
    "export": "run_export",
    "build": "run_build",
}


class GivenError(TwofourError):
    """Ends a command where the pipeline would begin."""


def options_of(command: str) -> Iterator[str]:
    """Every option of a command by its long name; of a pair, the one that is not the default."""
    commands: Any = typer.main.get_command(application())
    for parameter in commands.commands[command].params:
        if parameter.param_type_name == "option" and parameter.name != "help":
            yield (*parameter.secondary_opts, *parameter.opts)[0]


def asked(command: str, *arguments: str, patch: pytest.MonkeyPatch) -> tuple[Path, RunOptions]:
    """The run folder and the options that a command hands to the pipeline."""
    given: list[Any] = []

    def stop(_model: object, out: Path, options: RunOptions, _progress: object) -> None:
        given.extend((out, options))
        raise GivenError("given")

    patch.setattr(f"twofour.jobs.{COMMANDS[command]}", stop)
    CliRunner().invoke(application(), [command, "model.onnx", *arguments])
    return given[0], given[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-drop", "much"], "'much' is no number"),
        (["--max-drop=-1"], "--max-drop -1 is not a possible drop"),
        (["--max-drop", "nan"], "--max-drop nan is not a possible drop"),
        (["--budget", "80"], "--budget 80 is not between 0 and 1"),
        (
            ["--budget", "0.8", "--max-drop", "1"],
            "--max-drop and --budget cannot be given together",
        ),
        (["--loss", "least"], "'least' is not one of 'metric', 'outputs'"),
        (["--layers", "none.txt"], "cannot read none.txt"),
    ],
)
def test_budgets_that_make_no_sense_are_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(application(), ["sensitivity", "model.onnx", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_the_table_above_has_every_option() -> None:
    there = {option for command in COMMANDS for option in options_of(command)}
    assert there == ONCE.keys() | SAID_ELSEWHERE


@pytest.mark.parametrize("command", COMMANDS)
def test_each_option_changes_what_the_pipeline_is_asked_for(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layers.txt").write_text("head\n")
    (tmp_path / "run.toml").write_text("seed = 5\n")
    usual = asked(command, patch=monkeypatch)
    assert usual[1] == RunOptions()
    changed = {
        option: asked(command, option, *ONCE[option], patch=monkeypatch)[1]
        for option in options_of(command)
        if option in ONCE
    }
    assert [option for option, options in changed.items() if options == usual[1]] == []
    assert asked(command, "--out", "r", patch=monkeypatch)[0] == Path("r")


def test_the_tensorrt_of_another_machine_is_refused_for_a_build_here(tmp_path: Path) -> None:
    file = save(two_weights(), tmp_path / "model.onnx")
    command = ["build", str(file), "--tensorrt-version", "8.6"]
    result = CliRunner().invoke(application(), command)
    assert result.exit_code == 2
    assert "machine of --emit-trtexec" in result.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--mean", "0.485,0.456,0.406"], {"image_mean": (0.485, 0.456, 0.406)}),
        (["--size", "224x320"], {"image_size": (224, 320)}),
        (["--size", "224"], {"image_size": (224, 224)}),
    ],
)
def test_numbers_of_images_are_read(
    arguments: list[str], expected: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = asked("prune", *arguments, patch=monkeypatch)[1].calibration
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--mean", "a,b,c"], "--mean: cannot read 'a,b,c'"),
        (["--std", "nan"], "--std: cannot read 'nan'"),
        (["--size", "3x224x224"], "--size 3x224x224 has 3 numbers"),
        (["--size", "0"], "--size: cannot read '0'\nhint: write height and width"),
    ],
)
def test_numbers_of_images_that_cannot_be_read_are_refused(
    arguments: list[str], reason: str
) -> None:
    result = CliRunner().invoke(application(), ["prune", "model.onnx", *arguments])
    assert result.exit_code == 2
    assert reason in result.output


def test_the_help_names_every_method_kind_of_data_and_form_of_a_model() -> None:
    shown = CliRunner().invoke(application(), ["prune", "--help"], env={"COLUMNS": "200"}).output
    words = re.sub(r"[│\s]+", " ", shown)
    data = [text for kind in KINDS for text in kind.written.split(", ")]
    named = [text.removeprefix("file").split(":")[0] for text in data]
    named += [*METHODS, *(form.written for form in FORMS)]
    assert [name for name in named if name not in words] == []


# --- from a file and into one ---------------------------------------------------------------------

COMMAND = "prune-export-build"


def given(text: str, *arguments: str, folder: Path, patch: pytest.MonkeyPatch) -> RunOptions:
    """The options that a command passes on, with a file of this text."""
    (folder / "run.toml").write_text(text)
    patch.chdir(folder)
    return asked(COMMAND, "--options", "run.toml", *arguments, patch=patch)[1]


def test_the_command_line_wins_over_the_file_even_with_a_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'seed = 3\nprecision = "float32"\npattern = {n = 1, m = 4}\nengine = "onnxruntime"\n'
    from_file = given(text, folder=tmp_path, patch=monkeypatch)
    assert (from_file.seed, from_file.pattern) == (3, Pattern(1, 4))
    options = given(
        text, "--seed", "0", "--pattern", "2:4", "--engine", "auto",
        folder=tmp_path, patch=monkeypatch,
    )  # fmt: skip
    assert options == RunOptions(precision=from_file.precision)


def test_an_option_beside_those_of_the_file_changes_its_field_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "[calibration]\ndata = 'x.npz'\nsamples = 7\n[budget]\nshare = 0.5\n"
    options = given(text, "--calibrate-samples", "9", folder=tmp_path, patch=monkeypatch)
    assert (options.calibration.data, options.calibration.samples) == ("x.npz", 9)
    assert options.budget.share == 0.5


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("calibration.sample = 5", "calibration.sample"),
        ("seed = 'one'", "seed"),
        ("build.shapes = [{input = 'x'}]", "build.shapes.0.min"),
        ("opset = 1979-05-27", "opset"),
        ("seed = " + 9999 * "[", "not TOML"),
        ("seed = -1", "--seed -1"),
        ("budget = {share = 0.5, max_drop = 1.0}", "--max-drop and --budget"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_the_file(
    text: str, where: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    ended = CliRunner().invoke(application(), ["prune", "m.onnx", "--options", str(file)])
    assert ended.exit_code == 2
    said = ended.output.replace("\n", " ")
    assert "run.toml: " in said
    assert f" {where}" in said.partition("run.toml:")[2]


def test_a_file_that_is_not_there_is_named() -> None:
    ended = CliRunner().invoke(application(), ["prune", "m.onnx", "--options", "none.toml"])
    assert ended.exit_code == 2
    assert "cannot read none.toml" in ended.output


def test_without_a_reader_of_toml_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tomllib", "tomli"):  # Python 3.10 has the first no more than this
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "run.toml").write_text("seed = 1\n")
    asked_for = ["prune", "m.onnx", "--options", str(tmp_path / "run.toml")]
    ended = CliRunner().invoke(application(), asked_for)
    assert ended.exit_code == 3
    assert "pip install tomli" in ended.output


def test_saved_options_are_read_back_whatever_is_in_them(tmp_path: Path) -> None:
    options = RunOptions(
        seed=5,
        pattern=Pattern(1, 8),
        selection=Selection(exclude=('a"b\\c', "*.é😀"), all_layers=True),
        dynamic=(DynamicAxis(input="x", axis=2, name="height"),),
        build=dataclasses.replace(
            RunOptions().build,
            shapes=(ShapeProfile(input='x": ', min=(1, 3), opt=(8, 3), max=(8, 3)),),
        ),
        quantize=Quantization.INT8,
        input_shapes=((1, 2), (3,)),
        stream=False,
    )
    file = tmp_path / "run.toml"
    write_options(file, options)
    assert read_options(file) == options


@pytest.mark.parametrize(
    "option", [o for o in options_of(COMMAND) if o in ONCE.keys() - {"--options"}]
)
def test_every_option_comes_back_from_the_file_that_is_saved(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("layers.txt").write_text("head\n")
    saved = asked(COMMAND, option, *ONCE[option], "--save-options", "run.toml", patch=monkeypatch)
    again = asked(COMMAND, "--options", "run.toml", patch=monkeypatch)[1]
    if option == "--layers":  # which file said it is not kept
        assert again.selection.exclude == saved[1].selection.exclude
    else:
        assert again == saved[1]
