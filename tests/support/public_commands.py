"""The `twofour` command as a user runs it, and what the tests read from what it leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from twofour import records
from twofour.records.eligibility import EligibilityReport, Verdict, VerdictName
from twofour.records.log import Build, BuildLog, BuildOutcome
from twofour.reports.eligibility_document import eligibility_document
from twofour.reports.text import markdown
from twofour.store import from_json

SOURCES = Path(records.__file__).resolve().parents[2]
LONGEST_S = 540.0
"""Of one command: below the suite's own limit of a test, so that its output is shown."""
USABLE = frozenset({VerdictName.ELIGIBLE, VerdictName.CHOSEN})


def twofour(folder: Path, *arguments: str) -> str:
    """Standard output of the command, run in the folder; it has to end in 0."""
    search = os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "twofour", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        check=False,
        text=True,
        timeout=LONGEST_S,
    )
    said = f"twofour {' '.join(arguments)} ended in {done.returncode}:\n{done.stderr}"
    assert done.returncode == 0, said
    return done.stdout


def logged_build(folder: Path, log: str) -> Build:
    """The one build that `twofour log` finds in the log of an engine."""
    found = from_json(BuildLog, twofour(folder, "log", log, "--json"))
    built = [build for build in found.builds if build.outcome is BuildOutcome.BUILT]
    assert len(built) == 1, [(b.first_line, b.last_line, b.outcome) for b in found.builds]
    return built[0]


def reported(folder: Path, *arguments: str) -> EligibilityReport:
    """The record of `twofour report`."""
    return from_json(EligibilityReport, twofour(folder, "report", *arguments, "--json"))


def by_node(report: EligibilityReport) -> dict[str, Verdict]:
    """Node -> its verdict."""
    return {verdict.node: verdict for verdict in report.verdicts if verdict.node is not None}


def nodes_named(names: Iterable[str] | None, nodes: Iterable[str]) -> frozenset[str]:
    """The nodes whose name is in one of a log's names; Myelin writes "_" for "/".

    Simpler than what the report does, and independent of it: no node's name is part of another's.
    """
    written = [name.replace("/", "_") for name in names or ()]
    return frozenset(n for n in nodes if any(n.replace("/", "_") in name for name in written))


def rows(report: EligibilityReport) -> str:
    """The report as text, for the message of a test that fails."""
    return markdown(eligibility_document(report))
