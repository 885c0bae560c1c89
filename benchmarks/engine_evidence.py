"""What TensorRT builds of many nets left behind, held against twofour's rules.

    python3 benchmarks/engine_evidence.py FOLDER --csv layers.csv --json findings.json > tables.md

FOLDER has a sub-folder for each built net, named `<net>-<precision>-b<batch>`, for example
`sweep_conv3x3-float16-b8`: a run folder, or at least `eligibility.json` as `twofour report --json`
prints it. `build.json` beside it gives GPU, version and shapes; else the report's words and, for
what they lack, `sparse.log`. Needs numpy and pydantic; no GPU.

stdout gets Markdown: forecast against listing over all layers, and for each precision, type and
operation; every layer that the rules were wrong about, with the log line; and for each operation,
kernel, type and batch which sizes got a sparse kernel, as the thresholds that agree best
(`engine_evidence_parts/thresholds.py` says how) beside the rule of thumb in use. `--csv` takes a
row for each listed layer, `--json` everything. Unknown stays unknown: a layer that a build is
silent about, folded away, or built without sparse weights neither agrees nor disagrees.

Exit codes: 0 done, 2 bad input, 3 nothing was measured (tables and files are written all the same).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine_evidence_parts.confusion import confusion_by_kind, confusion_of, disagreements
from engine_evidence_parts.csv_rows import to_csv
from engine_evidence_parts.kinds import findings_by_kind, listed
from engine_evidence_parts.layers import layers_of
from engine_evidence_parts.reading import read_nets
from engine_evidence_parts.records import Findings, LeftOut, Net
from engine_evidence_parts.tables import markdown, nothing_measured

from twofour.errors import TwofourError
from twofour.store import write_record, write_text

NOTHING_MEASURED = 3


def examine(folder: str, nets: Sequence[Net], left_out: Sequence[LeftOut] = ()) -> Findings:
    """All findings about nets that were read from a folder."""
    layers = tuple(layer for net in nets for layer in layers_of(net))
    return Findings(
        folder=folder,
        nets=tuple(net.folder for net in nets),
        left_out=tuple(left_out),
        unmatched_engine_layers=sum(len(net.report.unmatched_engine_layers) for net in nets),
        layers=layers,
        confusion=confusion_of(layers),
        by_kind=confusion_by_kind(layers),
        disagreements=disagreements(layers),
        kinds=findings_by_kind(layers),
        notes=tuple(note for net in nets for note in _notes(net)),
    )


def _notes(net: Net) -> Iterator[str]:
    """What warns against taking a net's report at its word."""
    yield from net.notes
    report = net.report
    if report.not_evidence is not None:
        yield f"{net.folder}: no evidence: {report.not_evidence}"
    doubts = (n for n in report.notes if n.startswith("WARNING") or "contradicts itself" in n)
    yield from (f"{net.folder}: {note}" for note in doubts if note != report.not_evidence)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="holds a sub-folder for each built net")
    parser.add_argument("--csv", type=Path, help="a row for each listed layer")
    parser.add_argument("--json", type=Path, help="everything")
    arguments = parser.parse_args(argv)
    try:
        findings = examine(str(arguments.folder), *read_nets(arguments.folder))
        if arguments.csv is not None:
            write_text(arguments.csv, to_csv(listed(findings.layers)))
        if arguments.json is not None:
            write_record(arguments.json, findings)
    except TwofourError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(markdown(findings), end="")
    nothing = nothing_measured(findings)
    if nothing is not None:
        print(f"error: {nothing}", file=sys.stderr)
        return NOTHING_MEASURED
    return 0


if __name__ == "__main__":
    sys.exit(main())
