"""What a comparison was asked for, and the variants that it plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from twofour.engines.protocol import Mode, ModeStatus
from twofour.engines.registry import ENGINES, Takes
from twofour.errors import BadInputError
from twofour.latency.variants import variant_name
from twofour.records.options import ExampleInputs

NO_TORCH = "there is no torch module: compare a run folder that was made from one"
StatusesOf = Callable[[str, Sequence[str]], Mapping[str, ModeStatus]]
"""Engine and modes -> which of them can run here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRequest:
    """A torch module to build from its source, with dense or saved weights."""

    source: str
    arguments: ExampleInputs
    weights: Path | None
    """Saved by the prune stage; None: those of the source."""
    input_names: tuple[str, ...]
    """Of the ONNX file, in its order, which is that of the module's arguments."""
    output_names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedModel:
    """One set of weights in every form there is of it."""

    weights: str
    """Label: dense, sparse, or the file's stem."""
    onnx: Path | None = None
    plans: Mapping[tuple[str, str], Path] = field(default_factory=dict)
    """Engine and mode -> a plan that is there already."""
    torch: TorchRequest | None = None
    no_torch: str = NO_TORCH
    """Why `torch` is None."""
    precision: str = "unknown"
    """Types of the ONNX file's graph; a plan does not tell its own."""
    dense: bool = False
    """Known not to be pruned: no mode is asked that only takes 2:4 weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One row of the comparison, before anything is loaded."""

    name: str
    model: ComparedModel
    engine: str
    mode: str
    again: bool = False
    why_not: str | None = None
    """It cannot be measured, and why; None: it can be tried."""
    hint: str | None = None

    @property
    def known_mode(self) -> Mode:
        """What the engine says of its mode."""
        return _modes(self.engine)[self.mode]

    def name_at(self, batch: int | None) -> str:
        """The name of its row at a batch of a sweep; None: there is no sweep."""
        return variant_name(
            self.model.weights, self.engine, self.mode, again=self.again, batch=batch
        )


def parse_engines(texts: Sequence[str]) -> tuple[tuple[str, str | None], ...]:
    """Read `engine:mode` and `engine` (all its modes), commas between; no mode is checked yet.

    Raises BadInputError for an engine that is not known.
    """
    pairs: dict[tuple[str, str | None], None] = {}
    for text in (part.strip() for whole in texts for part in whole.split(",") if part.strip()):
        engine, _, mode = text.partition(":")
        if engine not in ENGINES:
            raise BadInputError(
                f"--engines: there is no engine {engine!r}", hint=f"known are {', '.join(ENGINES)}"
            )
        pairs[engine, mode or None] = None
    if texts and not pairs:
        raise BadInputError("--engines names none", hint=f"known are {', '.join(ENGINES)}")
    return tuple(pairs)


def plan_variants(
    models: Sequence[ComparedModel],
    engines: Sequence[str],
    baseline: str | None,
    statuses: StatusesOf,
) -> tuple[tuple[Planned, ...], str]:
    """Every row, in order, and the name of the baseline.

    The baseline has a twin right behind it, for the noise, and so has the first weights of every
    engine and mode in which others are compared with it.

    Without `engines`: everything that can run here, both weights in the first engine and in those
    with sparse kernels, the first weights alone in the others. Raises BadInputError for an engine,
    mode or baseline that is not there.
    """
    asked = parse_engines(engines)
    rows = _asked(models, asked, statuses) if asked else _all(models, statuses)
    name = _baseline(rows, baseline)
    return tuple(_with_twins(rows, name)), name


def _asked(
    models: Sequence[ComparedModel],
    asked: Sequence[tuple[str, str | None]],
    statuses: StatusesOf,
) -> list[Planned]:
    modes: dict[str, list[str]] = {}
    for engine, mode in asked:
        known = _modes(engine)
        if mode is not None and mode not in known:
            raise BadInputError(
                f"--engines: {engine} has no mode {mode!r}", hint=f"it has {', '.join(known)}"
            )
        modes.setdefault(engine, []).extend(known if mode is None else (mode,))
    tried = {engine: statuses(engine, tuple(dict.fromkeys(of))) for engine, of in modes.items()}
    rows = {
        row.name: row
        for engine, mode in asked
        for wanted in (_modes(engine) if mode is None else (mode,))
        for row in _rows(models, tried[engine][wanted])
    }
    return list(rows.values())


def _all(models: Sequence[ComparedModel], statuses: StatusesOf) -> list[Planned]:
    rows: list[Planned] = []
    for engine in ENGINES:
        if not any(_form_for(engine, model) for model in models):
            continue
        for status in statuses(engine, tuple(_modes(engine))).values():
            found = _rows(models, status)
            started = any(row.why_not is None for row in rows)
            if status.why_not is not None or (started and not _packs_sparse(status)):
                found = found[:1]
            rows += found
    return rows


def _rows(models: Sequence[ComparedModel], status: ModeStatus) -> list[Planned]:
    taken = [m for m in models if _takes(status, m)] or list(models[:1])
    return [
        Planned(
            name=variant_name(model.weights, status.engine, status.mode),
            model=model,
            engine=status.engine,
            mode=status.mode,
            why_not=status.why_not or _no_form(status.engine, model),
            hint=status.hint if status.why_not else None,
        )
        for model in taken
    ]


def _takes(status: ModeStatus, model: ComparedModel) -> bool:
    return not (model.dense and _packs_sparse(status))


def _packs_sparse(status: ModeStatus) -> bool:
    return _modes(status.engine)[status.mode].needs_sparse


def _modes(engine: str) -> dict[str, Mode]:
    """By name, the usual one first."""
    return {mode.name: mode for mode in ENGINES[engine].engine().modes}


def _form_for(engine: str, model: ComparedModel) -> bool:
    takes = ENGINES[engine].takes
    if takes is Takes.MODULE:
        return model.torch is not None
    built = takes is Takes.PLAN and any(of == engine for of, _ in model.plans)
    return built or model.onnx is not None


def _no_form(engine: str, model: ComparedModel) -> str | None:
    if _form_for(engine, model):
        return None
    by_module = ENGINES[engine].takes is Takes.MODULE
    return model.no_torch if by_module else "there is no ONNX file of it"


def _baseline(rows: Sequence[Planned], asked: str | None) -> str:
    names = [row.name for row in rows]
    if asked is not None:
        if asked not in names:
            raise BadInputError(
                f"--baseline: there is no variant {asked!r}", hint=f"there are {', '.join(names)}"
            )
        return asked
    return next((row.name for row in rows if row.why_not is None), names[0])


def _with_twins(rows: Sequence[Planned], baseline: str) -> list[Planned]:
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
    result: list[Planned] = []
    for row in rows:
        result += [row, twin_of(row)] if row.name in twinned else [row]
    return result


def twin_of(row: Planned) -> Planned:
    """The same variant, to be opened a second time."""
    name = variant_name(row.model.weights, row.engine, row.mode, again=True)
    return replace(row, name=name, again=True)
