"""Under what circumstances a comparison was measured: noise, machine, clocks, rounds, settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from twofour.records.build import Gpu
from twofour.records.latency import (
    Clocks,
    Difference,
    LatencyComparison,
    Machine,
    NoiseFloor,
    RoundLoad,
    VariantSettings,
)
from twofour.reports.comparison.figures import per_cent, ratio_word, ratio_words
from twofour.reports.comparison.naming import without_batch
from twofour.reports.comparison.noise import QUIET, TOO_BUSY, is_too_busy, widened
from twofour.reports.comparison.parts import TRTEXEC, pair_name
from twofour.reports.comparison.setting_differences import SPARSITY
from twofour.reports.words import count, printable

_GIB = 1 << 30
_BUSY = 0.5
"""Part of the cores that others may keep busy before a comparison on them is not to be trusted."""
_CHANGED = 0.05
"""Part by which a clock must move to be said: the cores' own clocks jitter by less."""


def legend(comparison: LatencyComparison) -> str:
    """Which way a ratio reads, what it is the middle of, and what "no difference" rests on."""
    within = "cannot be told from one variant measured twice"
    rests_on = within if comparison.noise else "has an interval with 1 in it"
    paired = all(ratio.paired for ratio in comparison.ratios)
    middle = (
        "the middle of the ratios within each round, which need not equal the ratio of the medians"
    )
    withheld = dict.fromkeys(r.withheld.value for r in comparison.ratios if r.withheld is not None)
    undecided = f'; "undecided": {", or ".join(withheld)}' if withheld else ""
    return (
        f"time / baseline is {middle if paired else 'the ratio of the medians'}: below 1 is "
        f'faster; behind it its 95 % interval; "no difference" {rests_on}{undecided}'
    )


def busy_lines(comparison: LatencyComparison) -> tuple[str, ...]:
    """One warning for each batch in whose rounds other processes took more than an idle system.

    Where the system does not tell that, one by the load average at the start.
    """
    if comparison.loads:
        return tuple(_busy_line(load) for load in comparison.loads if load.part > QUIET)
    machine = comparison.machine
    average = None if machine is None else machine.start.load_average
    if machine is None or average is None or average <= _BUSY * machine.cores:
        return ()
    return (
        f"WARNING: other processes were running: load average {average:.2f} at the start, on "
        f"{count(machine.cores, 'core')}.",
    )


def _busy_line(load: RoundLoad) -> str:
    at = "" if load.batch is None else f" at batch {load.batch}"
    took = f"WARNING: other processes kept {load.other_cores:.2f} of {count(load.cores, 'core')}"
    if is_too_busy(load):
        return (
            f"{took} busy during the rounds{at}: from {per_cent(TOO_BUSY)} on no difference "
            "between variants on the CPU is judged."
        )
    return (
        f"{took} busy during the rounds{at}: a ratio of less than "
        f"{ratio_word(1 + widened(0.0, load))} between variants on the CPU is not told from that."
    )


def noise_lines(comparison: LatencyComparison) -> tuple[str, ...]:
    """How much a variant measured twice differs: the baseline, then those of other engines."""
    return tuple(printable(_noise_line(noise)) for noise in comparison.noise)


def machine_lines(comparison: LatencyComparison) -> tuple[str, ...]:
    """Processor, GPU, system and versions; clocks and load; rounds, warm-up, threads, seed."""
    machine = comparison.machine
    if machine is None:
        return (printable(_elsewhere(comparison)), _measured_line(comparison))
    parts = (_processor(machine), _gpu(machine.gpu), machine.platform)
    versions = f"Python {machine.python_version}"
    return (
        printable(" · ".join(part for part in parts if part)),
        printable(", ".join((versions, *machine.packages))),
        *map(printable, _clock_lines(machine)),
        _measured_line(comparison),
    )


def difference_lines(comparison: LatencyComparison) -> tuple[str, ...]:
    """Pairs that differ in more than sparsity, those that differ in the same way in one line.

    Another engine differs in nearly everything: the table of settings has it, not these lines.
    """
    pairs: dict[str, dict[str, None]] = {}
    for ratio in comparison.ratios:
        if not ratio.only_sparsity:
            said = "; ".join(_difference_words(ratio.differences)) or "settings that are not known"
            pairs.setdefault(said, {})[pair_name(comparison, ratio)] = None
    return tuple(
        printable(f"more than sparsity differs in {', '.join(names)}: {said}")
        for said, names in pairs.items()
    )


def note_lines(comparison: LatencyComparison) -> tuple[str, ...]:
    """What the comparison notes, without what a terminal might obey."""
    return tuple(map(printable, comparison.notes))


def _noise_line(noise: NoiseFloor) -> str:
    at = "" if noise.batch is None else f" at batch {noise.batch}"
    name = without_batch(noise.variant)
    low, high = ratio_word(1 / (1 + noise.floor)), ratio_word(1 + noise.floor)
    return (
        f"noise {per_cent(noise.floor)}{at}: {name} opened and measured twice gives "
        f"{ratio_words(noise)}; a ratio of {low} to {high} cannot be told from it"
    )


def _elsewhere(comparison: LatencyComparison) -> str:
    """What the settings tell of a machine that was not looked at."""
    settings = [v.settings for v in comparison.variants if v.settings is not None]
    known = dict.fromkeys(f"{_engine_version(s)} on {s.device}" for s in settings)
    return f"measured elsewhere: {', '.join(known) or 'machine not known'}"


def _engine_version(settings: VariantSettings) -> str:
    name = "trtexec of TensorRT" if settings.engine == TRTEXEC else settings.engine
    return f"{name} {settings.version or '(version not known)'}"


def _processor(machine: Machine) -> str:
    memory = machine.memory_bytes
    size = "" if memory is None else f", {memory / _GIB:.1f} GiB"
    return f"{machine.cpu}, {count(machine.cores, 'core')}{size}"


def _gpu(gpu: Gpu | None) -> str:
    if gpu is None:
        return ""
    major, minor = gpu.compute_capability
    driver = "" if gpu.driver is None else f", driver {gpu.driver}"
    memory = f"{gpu.memory_bytes / _GIB:.0f} GiB"
    return f"{gpu.name} (compute capability {major}.{minor}, {memory}{driver})"


def _clock_lines(machine: Machine) -> Iterator[str]:
    start, end = machine.start, machine.end
    said = [words for words in _clock_words(start, end) if words]
    if said:
        yield f"at the start: {', '.join(said)}" if end is None else f"clocks: {', '.join(said)}"
    for when, clocks in (("start", start), ("end", end)):
        if clocks is not None and clocks.gpu_throttled is not None:
            yield f"WARNING: the GPU was held down at the {when}: {clocks.gpu_throttled}"


def _clock_words(start: Clocks, end: Clocks | None) -> Iterator[str]:
    last = end or start
    yield _moved("CPU", start.cpu_mhz, last.cpu_mhz, "MHz")
    governors = dict.fromkeys(g for g in (start.cpu_governor, last.cpu_governor) if g is not None)
    yield f"governor {' then '.join(governors)}" if governors else ""
    yield _moved("GPU", start.gpu_sm_mhz, last.gpu_sm_mhz, "MHz")
    yield _moved("GPU memory", start.gpu_memory_mhz, last.gpu_memory_mhz, "MHz")
    yield _moved("GPU temperature", start.gpu_temperature_c, last.gpu_temperature_c, "°C")
    yield _moved("load average", start.load_average, last.load_average, "")


def _moved(what: str, start: float | None, end: float | None, unit: str) -> str:
    if start is None and end is None:
        return ""
    known = [value for value in (start, end) if value is not None]
    moved = abs(known[-1] - known[0]) > _CHANGED * abs(known[0])
    words = [f"{value:,.0f}" if unit else f"{value:.2f}" for value in known]
    change = f"{words[0]} then {words[-1]}" if moved else words[0]
    return f"{what} {change} {unit}".rstrip()


def _measured_line(comparison: LatencyComparison) -> str:
    options = comparison.options
    most = max((len(v.samples_ms) for v in comparison.variants), default=0)
    by_trtexec = any(v.settings and v.settings.engine == TRTEXEC for v in comparison.variants)
    # without a ratio, only the number of samples tells passes from single runs
    apart = not all(r.paired for r in comparison.ratios) or (by_trtexec and most > options.rounds)
    if apart:
        return (
            f"{count(most, 'run')} of each variant, one variant after the other: what drifted in "
            "between is in the ratios and not in their intervals"
        )
    if by_trtexec:
        return f"{count(most, 'round')}, order rotated; one sample is the median of a pass"
    threads = "" if options.threads is None else f", {count(options.threads, 'thread')}"
    return (
        f"{count(most, 'round')} in random order after {count(options.warmup, 'untimed run')} "
        f"of each variant{threads}, seed {options.seed}"
    )


def _difference_words(differences: Sequence[Difference]) -> Iterator[str]:
    if any(d.setting == "engine" for d in differences):
        yield "another engine"
        return
    if any(d.setting == "mode" for d in differences):
        yield "mode"
    for one in differences:
        if one.setting not in SPARSITY | {"mode"}:
            setting = one.setting.replace("_", " ")
            yield f"{setting} {one.variant} instead of {one.baseline}"
