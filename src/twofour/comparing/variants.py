"""The variants that are planned from what is compared: a row for each model, engine and mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from twofour.comparing.compared import NO_TORCH, ComparedModel
from twofour.engines.protocol import ENGINES, EngineInput, Mode, builders
from twofour.errors import BadInputError
from twofour.records import frozen
from twofour.records.export import EngineStatus
from twofour.records.latency import variant_name
from twofour.records.options import CompareOptions

StatusesOf = Callable[[str, Sequence[str]], Sequence[EngineStatus]]
"""Engine and modes -> whether it can run here in each of them, in the same order."""


@frozen
class PlannedVariant:
    """One row of the comparison, before anything is loaded."""

    model: ComparedModel
    engine: str
    mode: str
    again: bool = False
    why_not: str | None = None
    """Why it cannot be measured; None: it can be tried."""
    hint: str | None = None

    @property
    def name(self) -> str:
        """The name without the batch of a sweep."""
        return self.name_at(None)

    def name_at(self, batch: int | None) -> str:
        """The name of its row at a batch of a sweep; None: there is no sweep."""
        return variant_name(
            self.model.weights, self.engine, self.mode, again=self.again, batch=batch
        )

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


def parse_engines(texts: Sequence[str]) -> tuple[tuple[str, str | None], ...]:
    """Read `engine:mode` and `engine` (all its modes); BadInputError for an unknown engine."""
    pairs: dict[tuple[str, str | None], None] = {}
    for text in ",".join(texts).split(","):
        engine, _, mode = text.strip().partition(":")
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
        rows = _asked(models, options.engines, statuses)
    elif options.variants:
        rows = _all(models, statuses)
    else:
        rows = _deployed(models, run_in, statuses)
    names = [row.name for row in rows]
    baseline = options.baseline
    if baseline is None:
        baseline = next((row.name for row in rows if row.why_not is None), names[0])
    if baseline not in names:
        raise BadInputError(
            f"--baseline: there is no variant {baseline!r}", hint=f"there are {', '.join(names)}"
        )
    return tuple(_with_twins(rows, baseline)), baseline


def _asked(
    models: Sequence[ComparedModel], asked: Sequence[str], statuses: StatusesOf
) -> list[PlannedVariant]:
    # onnxruntime:cpu,torch:eager,torch -> onnxruntime: cpu; torch: eager, then its other modes
    wanted: dict[str, dict[str, None]] = {}
    for engine, mode in parse_engines(asked):
        known = _modes(engine)
        if mode is not None and mode not in known:
            raise BadInputError(
                f"--engines: {engine} has no mode {mode!r}", hint=f"it has {', '.join(known)}"
            )
        modes = known if mode is None else (mode,)
        wanted.setdefault(engine, {}).update(dict.fromkeys(modes))
    rows: list[PlannedVariant] = []
    for engine, names in wanted.items():
        for mode, status in zip(names, statuses(engine, tuple(names)), strict=True):
            rows += _rows(models, mode, status)
    return rows


def _deployed(
    models: Sequence[ComparedModel], run_in: Sequence[str], statuses: StatusesOf
) -> list[PlannedVariant]:
    """One engine and mode that can run, behind those before it that cannot."""
    # of a run in tensorrt:gpu that is opened on a laptop: that row says why not, onnxruntime runs
    usual = [(f"{row.name}:{row.engine().modes[0].name}",) for row in builders()]
    rows: list[PlannedVariant] = []
    for asked in filter(None, (run_in, *usual)):
        rows += _asked(models, asked, statuses)
        if any(row.why_not is None for row in rows):
            break
    return rows


def _all(models: Sequence[ComparedModel], statuses: StatusesOf) -> list[PlannedVariant]:
    """Every weights in the first engine and in those with sparse kernels, else the first alone."""
    rows: list[PlannedVariant] = []
    for engine in ENGINES:
        if all(_why_no_form(engine, model) for model in models):
            continue
        modes = _modes(engine)
        for mode, status in zip(modes, statuses(engine, tuple(modes)), strict=True):
            # a mode without sparse kernels shows the dense file alone
            is_first = all(row.why_not is not None for row in rows)
            shows_sparsity = is_first or modes[mode].needs_sparse
            of_mode = _rows(models, mode, status)
            rows += of_mode if shows_sparsity and status.why_not is None else of_mode[:1]
    return rows


def _rows(models: Sequence[ComparedModel], mode: str, status: EngineStatus) -> list[PlannedVariant]:
    if _modes(status.engine)[mode].needs_sparse:
        models = [model for model in models if not model.dense] or models[:1]
    return [
        PlannedVariant(
            model=model,
            engine=status.engine,
            mode=mode,
            why_not=status.why_not or _why_no_form(status.engine, model),
            hint=status.hint if status.why_not else None,
        )
        for model in models
    ]


def _modes(engine: str) -> dict[str, Mode]:
    """The engine's modes by name, the usual one first."""
    return {mode.name: mode for mode in ENGINES[engine].engine().modes}


def _why_no_form(engine: str, model: ComparedModel) -> str | None:
    takes = ENGINES[engine].takes
    if takes is EngineInput.MODULE:
        return NO_TORCH if model.torch is None else None
    if model.onnx is not None:
        return None
    is_built = takes is EngineInput.PLAN and model.plans
    return None if is_built else "there is no ONNX file of it"


def _with_twins(rows: Sequence[PlannedVariant], baseline: str) -> list[PlannedVariant]:
    """One twin for each engine and mode that needs it: of the baseline, else of the first."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.why_not is None:
            groups.setdefault((row.engine, row.mode), []).append(row.name)
    twinned = set()
    for names in groups.values():
        if baseline in names:
            twinned.add(baseline)
        elif len(names) > 1:
            twinned.add(names[0])
    with_twins: list[PlannedVariant] = []
    for row in rows:
        with_twins.append(row)
        if row.name in twinned:
            with_twins.append(replace(row, again=True))
    return with_twins
