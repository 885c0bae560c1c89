"""Adding a format: one function, under one name, for every report."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.comparison_cases import run_folder
from support.render_cases import every_status
from typer.testing import CliRunner

from twofour.cli import application
from twofour.errors import BadInputError
from twofour.reports import FORMATS, renderer
from twofour.reports.document import Document
from twofour.reports.eligibility_document import eligibility_document
from twofour.reports.latency_document import latency_document


def toy(document: Document) -> str:
    """Names of the tables' columns, a table a line."""
    lines = (" ".join(column.head for column in table.columns) for table in document.tables)
    return f"{document.name}\n" + "\n".join(lines) + "\n"


@pytest.fixture
def with_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "toy", toy)


@pytest.mark.usefixtures("with_toy")
def test_a_format_that_is_added_gets_every_report() -> None:
    render = renderer("toy")
    assert "layer verdict reasons" in str(render(eligibility_document(every_status())))
    assert "variant median ms" in str(render(latency_document(run_folder())))


@pytest.mark.usefixtures("with_toy")
def test_report_takes_a_format_that_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = SimpleNamespace(report=every_status())
    monkeypatch.setattr("twofour.pipeline.reporting.report_folder", lambda *_: judged)
    done = CliRunner().invoke(application(), ["report", "somewhere", "--format", "toy"])
    assert done.exit_code == 0
    assert done.stdout.startswith("digits.py:make\n layers weights")


def test_a_format_that_there_is_not_is_refused_with_those_there_are() -> None:
    with pytest.raises(BadInputError, match="no format 'pdf'") as refused:
        renderer("pdf")
    assert "table, markdown, csv, html" in (refused.value.hint or "")
