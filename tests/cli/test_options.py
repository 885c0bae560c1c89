"""Every option of the commands that run stages reaches the pipeline, or shows in what is said."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from support.onnx_models import save, two_weights
from typer.testing import CliRunner, Result

from twofour.cli import application
from twofour.errors import TwofourError
from twofour.pruning.methods import METHODS
from twofour.records.export import TrtexecFolder
from twofour.records.options import RunOptions
from twofour.sources.calibration.kinds import KINDS
from twofour.store import read_record

SHAPE = "1x8x6x6"
ONCE: dict[str, list[str]] = {
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
SAID_ELSEWHERE = {"--out", "--json", "--quiet", "--emit-trtexec", "--tensorrt-version"}
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
    usual = asked(command, patch=monkeypatch)
    assert usual[1] == RunOptions()
    changed = {
        option: asked(command, option, *ONCE[option], patch=monkeypatch)[1]
        for option in options_of(command)
        if option in ONCE
    }
    assert [option for option, options in changed.items() if options == usual[1]] == []
    assert asked(command, "--out", "r", patch=monkeypatch)[0] == Path("r")


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Result]:
    """`twofour build` of a small file, with more arguments."""
    file = save(two_weights(), tmp_path / "model.onnx")
    return lambda *more: CliRunner().invoke(application(), ["build", str(file), *map(str, more)])


def test_the_tensorrt_of_another_machine_is_refused_for_a_build_here(
    build: Callable[..., Result],
) -> None:
    result = build("--tensorrt-version", "8.6")
    assert result.exit_code == 2
    assert "machine of --emit-trtexec" in result.output


def test_the_tensorrt_of_the_other_machine_is_ten_unless_said(
    build: Callable[..., Result], tmp_path: Path
) -> None:
    for name, more in (("a", ()), ("b", ("--tensorrt-version", "8.6"))):
        assert build("--emit-trtexec", tmp_path / name, *more).exit_code == 0
    records = [read_record(TrtexecFolder, tmp_path / name / "emitted.json") for name in "ab"]
    assert [record.tensorrt for record in records] == ["10.x", "8.x from 8.6 on"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--mean", "0.485,0.456,0.406"], {"image_mean": (0.485, 0.456, 0.406)}),
        (["--std", "1"], {"image_std": (1.0,)}),
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
        (["--size", "3x"], "--size: cannot read '3x'"),
    ],
)
def test_numbers_of_images_that_cannot_be_read_are_refused(
    arguments: list[str], reason: str
) -> None:
    result = CliRunner().invoke(application(), ["prune", "model.onnx", *arguments])
    assert result.exit_code == 2
    assert reason in result.output


def test_the_help_names_every_method() -> None:
    shown = CliRunner().invoke(application(), ["prune", "--help"], env={"COLUMNS": "200"}).output
    assert [name for name in METHODS if name not in shown] == []


def test_the_help_names_every_kind_of_calibration_data() -> None:
    shown = CliRunner().invoke(application(), ["prune", "--help"], env={"COLUMNS": "200"}).output
    written = [text for kind in KINDS for text in kind.written.split(", ")]
    words = [text.removeprefix("file").split(":")[0] for text in written]
    assert [word for word in words if word not in " ".join(shown.split())] == []
