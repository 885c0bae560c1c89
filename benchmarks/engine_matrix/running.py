"""Runs of twofour's own commands, one for each case, until the budget is spent."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engine_matrix.making import DENSE
from engine_matrix.plan import MODES, Case
from twofour.graph.opened import open_onnx

REPORT, LATENCY = "report.md", "latency.json"
"""What the commands leave last."""
_LAST_WORDS = 600
Command = Callable[[Case, "Folders"], list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """Where the ONNX files lie, where the run folders go, and what builds there."""

    nets: Path
    engines: Path
    engine: str
    """One of MODES."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a command for one case ended."""

    case: str
    command: str
    exit_code: int | None
    """None: it was stopped at its time limit, or not begun."""
    seconds: float
    said: str


def build_command(case: Case, folders: Folders) -> list[str]:
    """The main job on a dense ONNX file: pruned, validated, built twice, reported."""
    model = folders.nets / case.folder / DENSE
    sizes = {tensor.name: (case.batch, *tensor.shape[1:]) for tensor in open_onnx(model).inputs}
    shapes = ",".join(f"{name}={'x'.join(map(str, dims))}" for name, dims in sizes.items())
    out = ["--out", str(folders.engines / case.name), "--engine", folders.engine, "--quiet"]
    # chains of grouped convolutions have nothing that sparse math is known to use
    everything = ["--all-layers"] if case.net.startswith("sweep_") else []
    return ["prune-export-build", str(model), "--shapes", shapes, *everything, *out]


def compare_command(case: Case, folders: Folders) -> list[str]:
    """Sparse against dense engine, and the twin that gives the noise."""
    run, modes = str(folders.engines / case.name), MODES[folders.engine]
    return ["compare", run, "--engines", modes, "--time-limit", "12", "--quiet"]


def waiting(cases: Sequence[Case], folders: Folders, result: str) -> list[Case]:
    """The cases that have what the command reads and not yet what it leaves."""
    needed = {
        case: folders.nets / case.folder / DENSE
        if result == REPORT
        else folders.engines / case.name / REPORT
        for case in cases
    }
    return [
        case
        for case in cases
        if needed[case].is_file() and not (folders.engines / case.name / result).is_file()
    ]


def run_all(
    cases: Sequence[Case], command: Command, folders: Folders, budget_s: float
) -> list[Outcome]:
    """The command for each case; the outcomes are also kept beside the engines."""
    deadline = time.monotonic() + budget_s
    outcomes = []
    for case in cases:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        outcomes.append(_run(case, command(case, folders), left_s))
        _keep(folders.engines, outcomes[-1])
    return outcomes


def _run(case: Case, arguments: list[str], limit_s: float) -> Outcome:
    started = time.monotonic()
    command = [sys.executable, "-m", "twofour", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s)
        code, said = done.returncode, done.stderr
    except subprocess.TimeoutExpired:
        code, said = None, f"stopped after {limit_s:.0f} s, the rest of the budget"
    outcome = Outcome(
        case=case.name,
        command=arguments[0],
        exit_code=code,
        seconds=round(time.monotonic() - started, 1),
        said=said.strip()[-_LAST_WORDS:],
    )
    print(case.name, outcome.exit_code, f"{outcome.seconds} s", outcome.said, file=sys.stderr)
    return outcome


def _keep(engines: Path, outcome: Outcome) -> None:
    engines.mkdir(parents=True, exist_ok=True)
    with (engines / "outcomes.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")
