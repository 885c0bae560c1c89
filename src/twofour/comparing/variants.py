"""The variants that are planned from what is compared: a row for each model, engine and mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from twofour.comparing.compared import NO_TORCH, ComparedModel
from twofour.engines.protocol import ENGINES, EngineInput, Mode, ModeStatus, builders
from twofour.errors import BadInputError
from twofour.records.latency import variant_name
from twofour.records.options import CompareOptions

StatusesOf = Callable[[str, Sequence[str]], Mapping[str, ModeStatus]]
"""Engine and modes -> which of them can run here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedVariant:
    """One row of the comparison, before anything is loaded."""

    name: str
    model: ComparedModel
    engine: str
    mode: str
    again: bool = False
    why_not: str | None = None
    """Why it cannot be measured; None: it can be tried."""
    hint: str | None = None

    @property
    def known_mode(self) -> Mode:
        """What the engine says of its mode."""
        return _modes(self.engine)[self.mode]

    @property
    def allows_sparse(self) -> bool | None:
        """Whether the builder may use sparse kernels; None for a plan of unknown origin."""
        if self.known_mode.sparse_kernels is False:
            return False
        return None if self.model.onnx is None else not self.model.dense

    def name_at(self, batch: int | None) -> str:
        """The name of its row at a batch of a sweep; None: there is no sweep."""
        return variant_name(
            self.model.weights, self.engine, self.mode, again=self.again, batch=batch
        )


def parse_engines(texts: Sequence[str]) -> tuple[tuple[str, str | None], ...]:
    """Read `engine:mode` and `engine` (all its modes); BadInputError for an unknown engine."""
    pairs: dict[tuple[str, str | None], None] = {}
    for text in (part.strip() for whole in texts for part in whole.split(",") if part.strip()):
        engine, _, mode = text.partition(":")
        if engine not in ENGINES:
            raise BadInputError(
                f"--engines: there is no engine {engine!r}", hint=f"known are {', '.join(ENGINES)}"
            )
        pairs[engine, mode or None] = None
    return tuple(pairs)


def plan_variants(
    models: Sequence[ComparedModel],
    options: CompareOptions,
    statuses: StatusesOf,
    run_in: Sequence[str] = (),
) -> tuple[tuple[PlannedVariant, ...], str]:
    """Every row, in order, each twin right behind its row, and the name of the baseline.

    Without `engines` and `variants`: every weights in the first engine that can run here, `run_in`
    before others. Raises BadInputError for an engine, mode or baseline that is not there.
    """
    if options.engines:
        rows = _asked(models, parse_engines(options.engines), statuses)
    elif options.variants:
        rows = _all(models, statuses)
    else:
        rows = _deployed(models, run_in, statuses)
    names = [row.name for row in rows]
    baseline = options.baseline
    if baseline is not None and baseline not in names:
        raise BadInputError(
            f"--baseline: there is no variant {baseline!r}", hint=f"there are {', '.join(names)}"
        )
    if baseline is None:
        baseline = next((row.name for row in rows if row.why_not is None), names[0])
    return tuple(_with_twins(rows, baseline)), baseline


def _asked(
    models: Sequence[ComparedModel],
    asked: Sequence[tuple[str, str | None]],
    statuses: StatusesOf,
) -> list[PlannedVariant]:
    wanted: dict[str, dict[str, None]] = {}
    for engine, mode in asked:
        known = _modes(engine)
        if mode is not None and mode not in known:
            raise BadInputError(
                f"--engines: {engine} has no mode {mode!r}", hint=f"it has {', '.join(known)}"
            )
        modes = known if mode is None else (mode,)
        wanted.setdefault(engine, {}).update(dict.fromkeys(modes))
    rows: list[PlannedVariant] = []
    for engine, of in wanted.items():
        for status in statuses(engine, tuple(of)).values():
            rows += _rows(models, status)
    return rows


def _deployed(
    models: Sequence[ComparedModel], run_in: Sequence[str], statuses: StatusesOf
) -> list[PlannedVariant]:
    """One engine and mode that can run, behind those before it that cannot."""
    usual = [f"{row.name}:{row.engine().modes[0].name}" for row in builders()]
    rows: list[PlannedVariant] = []
    for pair in parse_engines((*run_in, *usual)):
        rows += _asked(models, (pair,), statuses)
        if any(row.why_not is None for row in rows):
            break
    return rows


def _all(models: Sequence[ComparedModel], statuses: StatusesOf) -> list[PlannedVariant]:
    """Every weights in the first engine and in those with sparse kernels, else the first alone."""
    rows: list[PlannedVariant] = []
    for engine in ENGINES:
        if all(_why_no_form(engine, model) for model in models):
            continue
        for status in statuses(engine, tuple(_modes(engine))).values():
            found = _rows(models, status)
            started = any(row.why_not is None for row in rows)
            needs_sparse = _modes(engine)[status.mode].needs_sparse
            if status.why_not is not None or (started and not needs_sparse):
                found = found[:1]
            rows += found
    return rows


def _rows(models: Sequence[ComparedModel], status: ModeStatus) -> list[PlannedVariant]:
    needs_sparse = _modes(status.engine)[status.mode].needs_sparse
    taken = [m for m in models if not (needs_sparse and m.dense)] or list(models[:1])
    return [
        PlannedVariant(
            name=variant_name(model.weights, status.engine, status.mode),
            model=model,
            engine=status.engine,
            mode=status.mode,
            why_not=status.why_not or _why_no_form(status.engine, model),
            hint=status.hint if status.why_not else None,
        )
        for model in taken
    ]


def _modes(engine: str) -> dict[str, Mode]:
    """The engine's modes by name, the usual one first."""
    return {mode.name: mode for mode in ENGINES[engine].engine().modes}


def _why_no_form(engine: str, model: ComparedModel) -> str | None:
    takes = ENGINES[engine].takes
    if takes is EngineInput.MODULE:
        return NO_TORCH if model.torch is None else None
    built = takes is EngineInput.PLAN and any(of == engine for of, _ in model.plans)
    return None if built or model.onnx is not None else "there is no ONNX file of it"


def _with_twins(rows: Sequence[PlannedVariant], baseline: str) -> list[PlannedVariant]:
    """One twin for each engine and mode that needs it: of the baseline, else of the first."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.why_not is None:
            groups.setdefault((row.engine, row.mode), []).append(row.name)
    twinned = {
        baseline if baseline in names else names[0]
        for names in groups.values()
        if baseline in names or len(names) > 1
    }
    result: list[PlannedVariant] = []
    for row in rows:
        result.append(row)
        if row.name in twinned:
            name = variant_name(row.model.weights, row.engine, row.mode, again=True)
            result.append(replace(row, name=name, again=True))
    return result
