"""One layer's whole story for the terminal: weight, rules, log lines, tactics, what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from difflib import get_close_matches
from itertools import islice

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from twofour.eligibility.evidence import BuildEvidence, Sighting, Sightings, engine_layers, look
from twofour.eligibility.names import NO_NAMES, REGION, split_name
from twofour.eligibility.rows import mention_source, quoted_source
from twofour.errors import BadInputError
from twofour.records.eligibility import EligibilityReport, Verdict
from twofour.records.export import GraphNode
from twofour.records.log import TunedLayer
from twofour.reports.eligibility_words import facts, pattern_word, stale_lines, surprise
from twofour.words import count, one_of, printable

_TACTICS_SHOWN = 12
_SUGGESTIONS = 5
_LONGEST_TRACE = 64
_WITH_WEIGHTS = "explain tells of layers with a weight: see twofour report"


def explain(report: EligibilityReport, evidence: BuildEvidence, layer: str) -> RenderableType:
    """Everything known about one layer, named by its layer, node or engine layer.

    Raises BadInputError for a name that no layer has, or that several have.
    """
    seen = look(report, evidence)
    aliases = [_names_in_use(sighting, seen) for sighting in seen.rows]
    nodes = {name for node in seen.nodes for name in (node.label, node.name)}
    at = find_layer(report, layer, aliases=aliases, weightless=_engine_names(evidence), nodes=nodes)
    verdict = report.verdicts[at]
    sighting = seen.rows[at]
    file = evidence.build.file if evidence.build is not None else ""
    tables = [_tactics(tuned) for tuned in (sighting.tuned,) if tuned is not None and tuned.tactics]
    return Group(
        *(Text(line, style="yellow") for line in stale_lines(report.stale)),
        _headline(verdict),
        _grid(_weight_facts(verdict, seen.nodes, sighting)),
        Text("\nreasons"),
        *_reasons(verdict),
        *_section("seen in the engine", _engine_lines(sighting)),
        *_section("seen in the log", _log_lines(sighting, file)),
        *tables,
    )


def find_layer(
    report: EligibilityReport,
    name: str,
    *,
    aliases: Sequence[Set[str]] = (),
    weightless: Iterable[str] = (),
    nodes: Set[str] = frozenset(),
) -> int:
    """Index of the one verdict of that name, or with that node in its engine layer.

    `aliases` are the names that engine and log have for each verdict. Raises BadInputError, with
    the names that are near. `weightless` are names of the engine: one that no verdict has is of a
    layer without a weight. `nodes` are names of the model's nodes.
    """
    names = [(v.layer, v.node, v.engine_layer, v.weight) for v in report.verdicts]
    aliased = [at for at, others in enumerate(aliases) if name in others]
    for found in (*_by_place(names, name), aliased):
        if len(found) == 1:
            return found[0]
        if found:
            where = "in the Myelin region" if REGION in name else "named"
            raise BadInputError(
                f"{count(len(found), 'layer')} are {where} {printable(name)!r}",
                hint="name one of: " + ", ".join(_apart([names[at] for at in found[:5]])),
            )
    _refuse_uncovered(report, name)
    if any(name == other or name in _constituents(other) for other in weightless):
        raise BadInputError(
            f"{printable(name)!r} is in the engine; no weight for sparse math is known in it",
            hint=_WITH_WEIGHTS,
        )
    if name in nodes:
        raise BadInputError(
            f"{printable(name)!r} is a node of the model, has no weight that sparse math could use",
            hint=_WITH_WEIGHTS,
        )
    known = list(dict.fromkeys(text for row in names for text in row[:2] if text))
    near = [text for text in known if name and name in text][:_SUGGESTIONS]
    near = near or get_close_matches(name, known, n=_SUGGESTIONS)
    hint = "did you mean " + ", ".join(map(printable, near)) if near else _some_of(report)
    raise BadInputError(f"the report has no layer {printable(name)!r}", hint=hint)


def _apart(rows: Sequence[tuple[str, str | None, str | None, str | None]]) -> list[str]:
    """Names that tell the rows apart: their layers where these differ, else their nodes."""
    layers = [layer for layer, *_ in rows]
    if len(set(layers)) == len(layers):
        return [printable(layer) for layer in layers]
    return [printable(node or layer) for layer, node, *_ in rows]


def _refuse_uncovered(report: EligibilityReport, name: str) -> None:
    """Raise BadInputError for what has weights that no row of the report names."""
    group = next((g for g in report.not_covered if name in (*g.users, *g.arrays)), None)
    if group is None:
        return
    if group.multiplies:
        what = f"is not covered: the weights of {group.op} are neither pruned nor judged"
    else:
        what = f"belongs to {group.op}, which is no factor of a matrix product"
    raise BadInputError(f"{printable(name)!r} {what}", hint=_WITH_WEIGHTS)


def _names_in_use(sighting: Sighting, seen: Sightings) -> set[str]:
    """What engine and log call the layer, and the regions that hold or may hold it."""
    mentions = (sighting.eligible, sighting.chosen)
    tuned = (sighting.tuned, sighting.dense_tuned)
    return {
        *(holder.name for holder in sighting.holders),
        *([sighting.region.name] if sighting.region is not None else []),
        *(region.name for region in (*sighting.among, *sighting.perhaps)),
        *(name for name, held in seen.regions.items() if sighting.node in held),
        *(mention.name for mention in mentions if mention is not None),
        *(layer.name for layer in tuned if layer is not None),
    }


def _some_of(report: EligibilityReport) -> str:
    """The first layers there are, for a name that is like none of them."""
    names = [printable(v.layer) for v in report.verdicts]
    if not names:
        return "the report has no layer"
    more = len(names) - _SUGGESTIONS
    rest = f" and {more:,} more" if more > 0 else ""
    return f"there are {', '.join(names[:_SUGGESTIONS])}{rest}: see twofour report"


def _by_place(names: Sequence[tuple[str | None, ...]], name: str) -> Iterator[list[int]]:
    """Indices of the rows that are so named, in each place in turn, and of those made of it."""
    for place in range(4):
        yield [at for at, row in enumerate(names) if row[place] == name]
    yield [
        at
        for at, row in enumerate(names)
        if any(name in _constituents(text) for text in row[:3] if text)
    ]


def _constituents(engine_layer: str) -> set[str]:
    """`conv` and `relu` of `conv + relu`."""
    parts = split_name(engine_layer, NO_NAMES)
    return {part.text for part in parts if not part.is_region}


def _engine_names(evidence: BuildEvidence) -> tuple[str, ...]:
    layers, _ = engine_layers(evidence)
    tuned = evidence.build.layers if evidence.build is not None else ()
    return (*(layer.name for layer in layers or ()), *(layer.name for layer in tuned))


def trace_of(verdict: Verdict, nodes: Sequence[GraphNode], node: int) -> tuple[str, ...]:
    """Op types between the layer and its stored weight, from the layer's side; () where direct."""
    if verdict.weight is None or verdict.weight in nodes[node].inputs:
        return ()
    producers = {name: at for at, n in enumerate(nodes) for name in n.outputs}
    waiting: list[tuple[str, tuple[str, ...]]] = [(name, ()) for name in nodes[node].inputs]
    seen: set[str] = set()
    for name, way in waiting:
        if name == verdict.weight:
            return way
        at = producers.get(name)
        if at is None or name in seen or len(way) >= _LONGEST_TRACE:
            continue
        seen.add(name)
        waiting += [(given, (*way, nodes[at].op)) for given in nodes[at].inputs]
    return ()


def _headline(verdict: Verdict) -> Text:
    said = surprise(verdict)
    how = "" if verdict.evidence is None else f", {verdict.evidence.value}"
    line = f"{printable(verdict.layer)} ({verdict.op}): {verdict.verdict.value}{how}"
    return Text(line if said is None else f"{line}; {said}", style="bold")


def _weight_facts(
    verdict: Verdict, nodes: Sequence[GraphNode], sighting: Sighting
) -> Iterator[tuple[str, str]]:
    if verdict.shape:
        yield "pattern", pattern_word(verdict)
        yield from facts(verdict)
    elif verdict.engine_layer is not None:
        yield "engine layer", verdict.engine_layer
    way = trace_of(verdict, nodes, sighting.node)
    if verdict.weight is not None:
        yield "way to the constant", " <- ".join(("layer", *way, verdict.weight))
    if verdict.profile_ms is not None:
        yield "time in the profile", f"{verdict.profile_ms:.4g} ms"


def _reasons(verdict: Verdict) -> Iterator[Text]:
    for reason in verdict.reasons:
        yield Text(f"  {reason.code.value}: {printable(reason.message)}", overflow="fold")
        if reason.source:
            yield Text(f"      source: {printable(reason.source)}", overflow="fold")
    yield Text(f"  what to do: {printable(verdict.remedy or 'nothing')}", overflow="fold")


def _engine_lines(sighting: Sighting) -> Iterator[str]:
    for holder in sighting.holders:
        kernel = holder.kernel or "kernel not named"
        marked = {True: ", weights sparse", False: ", weights dense", None: ""}
        yield f"{holder.name}: {kernel}{marked[holder.has_sparse_weights]}"
    if sighting.region is not None:
        yield f"inside the Myelin region {sighting.region.name}"
    if sighting.among:
        yield f"inside {one_of('Myelin region', [layer.name for layer in sighting.among])}"
    elif sighting.perhaps:
        regions = one_of("Myelin region", [layer.name for layer in sighting.perhaps])
        yield f"perhaps inside {regions}, whose name does not say what it holds"


def _log_lines(sighting: Sighting, file: str) -> Iterator[str]:
    for mention in (sighting.eligible, sighting.chosen):
        if mention is not None:
            yield mention_source(file, mention)
    for skipped in islice(sighting.skipped, _TACTICS_SHOWN):
        yield quoted_source(file, skipped)


def _section(title: str, lines: Iterator[str]) -> tuple[Text, ...]:
    texts = tuple(Text(f"  {printable(line)}", overflow="fold") for line in lines)
    return (Text(f"\n{title}"), *texts) if texts else ()


def _tactics(tuned: TunedLayer) -> Table:
    """The fastest tactics; the fastest sparse one is always among them."""
    title = f"tactics of {printable(tuned.name)} ({len(tuned.tactics):,} timed)"
    table = Table(box=box.SIMPLE_HEAD, title=Text(title), title_justify="left", show_edge=False)
    for column in ("ms", "sparse", "kernel", "runner", "line"):
        table.add_column(column, overflow="fold")
    shown = list(tuned.tactics[:_TACTICS_SHOWN])
    rest = tuned.tactics[_TACTICS_SHOWN:]
    if not any(t.sparse for t in shown):
        shown += [t for t in rest if t.sparse][:1]
    for tactic in shown:
        table.add_row(
            Text("-" if tactic.ms is None else f"{tactic.ms:g}"),
            Text({True: "sparse", False: "dense", None: "?"}[tactic.sparse]),
            Text(printable(tactic.kernel or "(no name)")),
            Text(printable(tactic.runner or "-")),
            Text(str(tactic.line)),
        )
    return table


def _grid(rows: Iterator[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 2))
    for label, value in rows:
        grid.add_row(Text(label), Text(printable(value), overflow="fold"))
    return grid
