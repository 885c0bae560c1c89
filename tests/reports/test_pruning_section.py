"""What a method did to each layer, in prune's own report and on a run's page."""

from __future__ import annotations

from dataclasses import replace

from support.render_cases import every_status
from support.report_cases import matmul

from twofour.records.options import Selection
from twofour.records.pruning import (
    Calibration,
    FixedChannels,
    OutputError,
    Permutation,
    PermutedClass,
    PermutedLayer,
    PrunedWeight,
    PruneResult,
    Repair,
    RepairKind,
    RepairTry,
)
from twofour.records.weights import HARDWARE_PATTERN
from twofour.reports import html, markdown
from twofour.reports.document import Table
from twofour.reports.eligibility_document import eligibility_document
from twofour.reports.html import drawn
from twofour.reports.pruning_plots import draw_errors
from twofour.reports.terminal import draw, plain_text
from twofour.reports.weights_document import (
    calibration_lines,
    permutation_section,
    prune_document,
    pruned_table,
    pruning_section,
)


def row(layer: str, calibration: float | None, held_out: float | None) -> PrunedWeight:
    weight = matmul(layer, 64, 64)
    error = None
    if calibration is not None:
        error = OutputError(calibration=calibration, held_out=held_out)
    return PrunedWeight(
        weight=weight,
        pruned=True,
        zeros=2048,
        kept_magnitude=0.75,
        reasons=(),
        method="admm" if error else "magnitude",
        output_error=error,
        note=None if error else "no calibration input reached it",
    )


ROWS = (row("a", 0.01, 0.012), row("b", 0.0002, None), row("c", None, None), row("d", 0.2, 0.3))
RESULT = PruneResult(
    source="model",
    pattern=HARDWARE_PATTERN,
    method="admm",
    selection=Selection(),
    weights=ROWS,
    calibration=Calibration(
        source="texts.txt", samples=256, held_out=25, notes=("3 lines were blank",)
    ),
)


def cells(table: Table) -> dict[str, tuple[str | None, ...]]:
    return {column.head: column.cells for column in table.columns}


def test_a_row_says_by_which_method_and_at_which_error() -> None:
    found = cells(pruned_table(ROWS))
    assert found["method"] == ("admm", "admm", "magnitude", "admm")
    assert found["output error"] == ("0.0100", "0.0002", None, "0.2000")
    assert found["held out"] == ("0.0120", None, None, "0.3000")
    assert found["notes"] == (None, None, "no calibration input reached it", None)


def test_without_data_there_are_no_such_columns() -> None:
    assert "output error" not in cells(pruned_table([ROWS[2]]))
    assert calibration_lines(replace(RESULT, calibration=None)) == ()


def test_the_data_and_the_largest_error_are_said_first() -> None:
    assert calibration_lines(RESULT) == (
        "calibrated with 256 samples of texts.txt, 25 of them held out",
        "3 lines were blank",
        "output error of 3 layers: median 0.0120, largest 0.3000 in d",
    )
    text = markdown.render(prune_document(RESULT))
    assert "largest 0.3000 in d" in text


def test_layers_that_differ_in_one_number_share_a_row_but_not_on_the_page() -> None:
    rows = [
        replace(row(f"h.{i}.{part}", 0.01 * (i + 1), None), zeros=2048 - i, kept_magnitude=0.75)
        for i in range(24)
        for part in ("fc1", "fc2")
    ]
    rows[4] = replace(rows[4], note="magnitude's mask would have lost less")
    rows[6] = replace(rows[6], method="wanda")
    table = pruned_table(rows)
    assert len(table.rows) == 48
    found = cells(table.folded())
    names = ("h.{0-1,4-23}.fc1", "h.{0-23}.fc2", "h.2.fc1", "h.3.fc1")
    assert found["layer"] == names
    assert found["output error"][:2] == ("0.0100 to 0.2400", "0.0100 to 0.2400")
    assert found["zeros"][:3] == ("49.4 % to 50.0 %", "49.4 % to 50.0 %", "50.0 %")
    assert found["kept |w|"] == ("75.0 %",) * 4
    assert found["notes"] == (None, None, "magnitude's mask would have lost less", None)
    shown = plain_text(draw((table,)))
    assert "h.{0-23}.fc2 x24" in " ".join(shown.split())
    assert len(shown.splitlines()) < 30
    document = prune_document(replace(RESULT, weights=tuple(rows)))
    assert all(one.weight.layer in html.render(document) for one in rows)


def test_a_layer_that_loses_nothing_on_held_out_samples_counts_with_0() -> None:
    rows = (row("a", 0.5, 0.0), row("b", 0.0, None), row("d", 0.2, 0.3))
    assert calibration_lines(replace(RESULT, weights=rows))[-1] == (
        "output error of 3 layers: median 0, largest 0.3000 in d"
    )


REPAIR = Repair(
    error_before=0.7,
    tried=(
        RepairTry(kind=RepairKind.BATCH_NORM, error=0.25, changed=5),
        RepairTry(kind=RepairKind.MATCHING, error=0.125, changed=6),
    ),
    taken=RepairKind.MATCHING,
    error_after=0.1251,
    judged_on=25,
    why="the outputs are nearest with it",
)


def test_repair_is_said_with_its_figures() -> None:
    assert calibration_lines(replace(RESULT, repair=REPAIR))[-1] == (
        "repair: matching of 6 layers taken: the outputs are nearest with it; error of the outputs "
        "on 25 held-out samples: 0.7000 one-shot, 0.1251 repaired, 0.2500 by batch-norm (squared "
        "distance to the dense ones over the variance of their columns)"
    )


def test_repair_that_was_not_taken_is_said_too() -> None:
    none = replace(REPAIR, taken=None, error_after=0.7, why="they are no nearer with it")
    assert calibration_lines(replace(RESULT, repair=none))[-1] == (
        "repair: none taken: they are no nearer with it; error of the outputs on 25 held-out "
        "samples: 0.7000 one-shot, 0.2500 by batch-norm, 0.1250 by matching (squared distance to "
        "the dense ones over the variance of their columns)"
    )
    unjudged = replace(none, error_before=None, error_after=None, judged_on=0, why="no sample")
    line = calibration_lines(replace(RESULT, repair=unjudged))[-1]
    assert line == "repair: none taken: no sample"


def test_the_plot_has_a_mark_per_error_and_none_for_layers_without() -> None:
    drawing = draw_errors(ROWS)
    assert drawing is not None
    text = str(drawn(drawing))
    assert text.count("<circle") == 2
    assert text.count("<rect") == 3
    assert "a\nadmm, held out: 0.012" in text
    assert draw_errors([ROWS[2]]) is None


def test_a_runs_page_shows_what_was_pruned_alone() -> None:
    left = replace(ROWS[0], pruned=False)
    section = pruning_section(replace(RESULT, weights=(left, *ROWS[1:])))
    assert section is not None
    (table,) = (block for block in section.blocks if isinstance(block, Table))
    assert cells(table)["layer"] == ("b", "c", "d")


def test_a_page_shows_the_table_and_the_plot() -> None:
    document = eligibility_document(every_status(), pruned=RESULT)
    page = html.render(document)
    assert "What pruning did to each layer" in page
    assert page.count("no calibration input reached it") == 1
    assert "Output error of each pruned layer" in page


def one_class(errors: tuple[float, float] | None, *, taken: bool, reason: str) -> PermutedClass:
    """Of two layers, the second with half of the errors of the first; or of one not looked at."""
    layers = [PermutedLayer(layer="alone")]
    if errors is not None:
        layers = [
            PermutedLayer(
                layer=f"l{at}",
                kept_before=0.6,
                kept_after=0.65,
                error_before=errors[0] / (1 + at),
                error_after=errors[1] / (1 + at),
            )
            for at in range(2)
        ]
    return PermutedClass(
        channels=64,
        layers=tuple(layers),
        efficacy=0.125 if errors else 0.0,
        taken=taken,
        reason=reason,
        is_time_cut=errors is None,
    )


PERMUTED = Permutation(
    seconds=30.0,
    classes=(
        one_class((0.08, 0.04), taken=True, reason="output error falls"),
        one_class(None, taken=False, reason="not searched: the time was up"),
    ),
    fixed=(FixedChannels(layer="stem", channels=3, reason="graph input 'x'"),),
)


def test_a_permutation_has_its_own_section_with_errors_before_and_after() -> None:
    found = permutation_section(PERMUTED)
    assert found is not None
    _, classes, fixed = found.blocks
    assert isinstance(classes, Table)
    assert isinstance(fixed, Table)
    assert cells(classes) == {
        "layers": ("l0 and 1 more", "alone"),
        "channels": ("64", "64"),
        "efficacy": ("12.5 %", None),
        "kept": ("60.0 % to 65.0 %", None),
        "output error": ("0.0600 to 0.0300", None),
        "taken": ("yes", "no"),
        "why": ("output error falls", "not searched: the time was up"),
    }
    assert cells(fixed)["why they stay"] == ("graph input 'x'",)
    text = markdown.render(prune_document(replace(RESULT, permutation=PERMUTED)))
    assert "1 of 2 classes of channels are in another order" in text
    assert "the time (30 s) ended the search" in text
    assert "whether the outputs of the pruned model are nearer with it is not known" in text
    judged = replace(PERMUTED, error_permuted=0.02, error_unpermuted=0.03)
    text = markdown.render(prune_document(replace(RESULT, permutation=judged)))
    assert "outputs on held-out samples: 0.0200 with it, 0.0300 without it" in text
    assert "is not known" not in text
    document = eligibility_document(every_status(), pruned=replace(RESULT, permutation=PERMUTED))
    assert "Channel permutation" in markdown.render(document)


def test_a_permutation_that_was_refused_says_why() -> None:
    left = tuple(replace(each, taken=False) for each in PERMUTED.classes)
    refused = replace(PERMUTED, classes=left, refused="output y: off by 1")
    text = markdown.render(prune_document(replace(RESULT, permutation=refused)))
    assert "refused: output y: off by 1" in text
    assert "saved weights have this order" not in text
    assert "is not known" not in text
    nothing = replace(PERMUTED, classes=(), fixed=())
    text = markdown.render(prune_document(replace(RESULT, permutation=nothing)))
    assert "no input channels of the pruned layers can change places" in text
