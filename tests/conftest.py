"""Options and fixtures of the whole suite."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from twofour.records.options import ExportOptions, Precision

if TYPE_CHECKING:
    from support.export_nets import Exported

    from twofour.workers.side_by_side import Pool

with contextlib.suppress(ModuleNotFoundError):  # tests/gpu runs where pytest is all there is
    from hypothesis import HealthCheck, settings

    # the machine's load must not decide whether a property holds
    settings.register_profile(
        "suite", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
    )
    settings.load_profile("suite")

os.environ["XDG_CONFIG_HOME"] = os.devnull  # what the user learned changes no test
Golden = Callable[[Path, str], None]


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup() -> None:
    """Make what costs more than most tests be paid once, where a test may come to need it."""
    if "twofour.workers.host" in sys.modules:
        from support.shared_costs import share_processes

        share_processes()
    if "torch.onnx._internal.exporter._registration" in sys.modules:
        from support.shared_costs import share_operators

        share_operators()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regen", action="store_true", help="rewrite the golden files")
    if importlib.util.find_spec("pytest_timeout") is None:
        parser.addini("timeout", "of pytest-timeout, which is not here to hold it")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run folder of the small torch model, which tests of commands only read."""
    from support.small_run import MODEL
    from typer.testing import CliRunner

    from twofour.cli import application

    out = tmp_path_factory.mktemp("cli") / "small"
    arguments = ["prune-export-build", MODEL, "--out", str(out), "--quiet"]
    result = CliRunner().invoke(application(), arguments)
    assert result.exit_code == 0, result.output
    return out


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compare text with a golden file; with --regen, write the file and skip."""

    def compare(path: Path, text: str) -> None:
        if request.config.getoption("--regen"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            pytest.skip(f"{path.name} was rewritten")
        assert text == path.read_text(encoding="utf-8"), f"{path.name}: look, then --regen"

    return compare


@pytest.fixture(
    scope="session",
    params=[
        Precision.FLOAT32,
        Precision.FLOAT16,
        pytest.param(Precision.BFLOAT16, marks=pytest.mark.full),
    ],
    ids=lambda p: p.value,
)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """One export of `Kinds` for each precision; torch is imported only where it is asked for."""
    import onnx
    from support.export_nets import Exported, example, kinds
    from support.exporting import export_onnx

    precision: Precision = request.param
    path = tmp_path_factory.mktemp("exported") / f"{precision.value}.onnx"
    options = ExportOptions(precision=precision)
    layers = export_onnx(kinds().train(), example(), {}, path, options)
    return Exported(precision, path, layers, onnx.load(path))


@pytest.fixture(scope="session")
def measurer() -> Iterator[Pool]:
    """One process for the measurements of many studies: to start it takes longer than they do."""
    from twofour.budget.measuring import SERVICE
    from twofour.workers.side_by_side import Pool

    with Pool(*SERVICE, 1) as workers:
        yield workers


@pytest.fixture(scope="module")
def measured_in_one_process(measurer: Pool) -> Iterator[None]:
    """Studies of a module leave their measurements to the one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "twofour.budget.study.open_workers", lambda *_: contextlib.nullcontext(measurer)
        )
        yield
