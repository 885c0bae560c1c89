"""What a latency comparison says in words: its answer, its pairs, noise, machine and notes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from twofour.latency.noise import QUIET, TOO_BUSY, floor_at, is_too_busy, own_floor, widened
from twofour.records.export import Gpu
from twofour.records.latency import (
    ComparedVariant,
    LatencyComparison,
    LatencyRatio,
    LatencyVerdict,
    Machine,
    NoiseFloor,
    Withheld,
    parse_variant_name,
    without_batch,
)
from twofour.words import count, printable, ratio_word, ratio_words, span, speed_up

TRTEXEC = "trtexec"
"""VariantSettings.engine of what was timed elsewhere: a sample is the median of a pass."""
NO_DIFFERENCE = LatencyVerdict.NO_DIFFERENCE.value
TOO_NOISY, TOO_FEW = "the noise hides any difference", "too few rounds to compare"
MACHINE_TOO_BUSY = "the machine is too busy to compare"
UNSTEADY = "the times are too unsteady to compare"
_TOO_NOISY = 0.1
"""Noise floor above which "no difference" would hide one that matters; a choice, not measured."""
_GIB = 1 << 30


def timed_batches(comparison: LatencyComparison) -> tuple[int | None, ...]:
    """Batches at which anything was measured, in the order of the variants."""
    return tuple(dict.fromkeys(v.batch for v in comparison.variants if v.samples_ms))


def timed_variants(comparison: LatencyComparison, batch: int | None) -> tuple[ComparedVariant, ...]:
    """Variants with samples at this batch."""
    return tuple(v for v in comparison.variants if v.samples_ms and v.batch == batch)


def noise_of(comparison: LatencyComparison, batch: int | None) -> NoiseFloor | None:
    """The baseline against its twin at this batch; other engines may have noise of their own."""
    found = (n for n in comparison.noise if n.batch == batch)
    return next((n for n in found if without_batch(n.variant) == comparison.baseline), None)


def over_baseline(comparison: LatencyComparison, batch: int | None) -> tuple[LatencyRatio, ...]:
    """Ratios over the comparison's baseline at this batch."""
    at = (r for r in comparison.ratios if r.batch == batch)
    return tuple(r for r in at if without_batch(r.baseline) == comparison.baseline)


def within_engines(comparison: LatencyComparison, batch: int | None) -> tuple[LatencyRatio, ...]:
    """Ratios over another baseline than the comparison's: sparse over dense in one engine."""
    at = (r for r in comparison.ratios if r.batch == batch)
    return tuple(r for r in at if without_batch(r.baseline) != comparison.baseline)


def pair_name(comparison: LatencyComparison, ratio: LatencyRatio) -> str:
    """What is divided by what, as short as it is clear; the batch is not in it.

    The variant alone where the baseline is the comparison's, "sparse / dense in torch:eager" where
    both ran in one engine and mode, else both names.
    """
    if without_batch(ratio.baseline) == comparison.baseline:
        return printable(without_batch(ratio.variant))
    variant, baseline, where = _sides(ratio)
    return printable(f"{variant} / {baseline}{where}")


def _sides(ratio: LatencyRatio) -> tuple[str, str, str]:
    """Both names, or both weights and the engine and mode of both: " in torch:eager"."""
    variant, baseline = parse_variant_name(ratio.variant), parse_variant_name(ratio.baseline)
    if variant.engine_mode == baseline.engine_mode:
        return variant.weights, baseline.weights, f" in {variant.engine_mode}"
    return without_batch(ratio.variant), without_batch(ratio.baseline), ""


def why_no_difference(comparison: LatencyComparison, ratio: LatencyRatio) -> str | None:
    """Why no difference is claimed; None where the verdict is faster or slower."""
    if ratio.withheld is not None:
        return MACHINE_TOO_BUSY if ratio.withheld is Withheld.BUSY else UNSTEADY
    if ratio.verdict is LatencyVerdict.UNDECIDED:
        return TOO_FEW
    if ratio.verdict is not LatencyVerdict.NO_DIFFERENCE:
        return None
    floor = own_noise(comparison, ratio)
    if floor is None:
        floor = floor_at(comparison.noise, comparison.baseline, ratio.batch)
    return TOO_NOISY if floor is not None and floor > _TOO_NOISY else NO_DIFFERENCE


def own_noise(comparison: LatencyComparison, ratio: LatencyRatio) -> float | None:
    """The larger floor of the engines and modes of both at the batch; None: not measured."""
    return own_floor(comparison.noise, ratio.variant, ratio.baseline, ratio.batch)


def noise_words(comparison: LatencyComparison, ratios: Sequence[LatencyRatio]) -> str:
    """Smallest to largest noise of these ratios, as far as it was measured."""
    found = [own_noise(comparison, ratio) for ratio in ratios]
    floors = [floor for floor in found if floor is not None]
    return _noise(floors) if floors else "noise not measured"


def _noise(floors: Sequence[float]) -> str:
    return "noise over 100 %" if max(floors) > 1 else f"noise {span(floors)}"


def legend(comparison: LatencyComparison) -> str:
    """What a ratio is, which way it reads, and what "no difference" depends on."""
    rests_on = "reaches into the noise" if comparison.noise else "contains 1"
    withheld = dict.fromkeys(r.withheld.value for r in comparison.ratios if r.withheld is not None)
    undecided = f'; "undecided": {", or ".join(withheld)}' if withheld else ""
    return (
        "time / baseline: the variant's time divided by the baseline's in the same round, the "
        "middle of all rounds; below 1 is faster. "
        f'"no difference": the interval {rests_on}{undecided}'
    )


def busy_lines(comparison: LatencyComparison) -> Iterator[str]:
    """One warning for each batch in whose rounds other processes took more than an idle system."""
    for load in (load for load in comparison.loads if load.part > QUIET):
        at = "" if load.batch is None else f" at batch {load.batch}"
        most = 1 + widened(0.0, load)
        found = (
            f": a ratio from {ratio_word(1 / most)} to {ratio_word(most)} on the CPU may be noise"
        )
        if is_too_busy(load):
            found = f"; above {100 * TOO_BUSY:.0f} % of the cores nothing is compared"
        took = f"{load.other_cores:.2f} of {count(load.cores, 'core')}"
        yield f"WARNING: other processes kept {took} busy during the rounds{at}{found}"


def noise_lines(comparison: LatencyComparison) -> Iterator[str]:
    """How much a variant measured twice differs: the baseline, then those of other engines."""
    for noise in comparison.noise:
        at = "" if noise.batch is None else f" at batch {noise.batch}"
        low, high = ratio_word(1 / (1 + noise.floor)), ratio_word(1 + noise.floor)
        yield printable(
            f"{_noise((noise.floor,))}{at}: {without_batch(noise.variant)}, measured twice, gives "
            f"the ratio {ratio_words(noise)}, so a ratio from {low} to {high} may be noise"
        )


def machine_lines(comparison: LatencyComparison) -> tuple[str, ...]:
    """Processor, GPU, system and versions; clocks and load; rounds, warm-up, threads, seed."""
    machine = comparison.machine
    if machine is None:
        return (_measured_line(comparison),)
    memory = machine.memory_bytes
    size = "" if memory is None else f", {memory / _GIB:.1f} GiB"
    processor = f"{machine.cpu}, {count(machine.cores, 'core')}{size}"
    parts = (processor, _gpu(machine.gpu), machine.platform)
    versions = f"Python {machine.python_version}"
    return (
        printable(" · ".join(part for part in parts if part)),
        printable(", ".join((versions, *machine.packages))),
        *map(printable, _clock_lines(machine)),
        _measured_line(comparison),
    )


def _gpu(gpu: Gpu | None) -> str:
    if gpu is None:
        return ""
    major, minor = gpu.compute_capability
    driver = "" if gpu.driver is None else f", driver {gpu.driver}"
    memory = f"{gpu.memory_bytes / _GIB:.0f} GiB"
    return f"{gpu.name} (compute capability {major}.{minor}, {memory}{driver})"


def _clock_lines(machine: Machine) -> Iterator[str]:
    """Clocks and load at the start and, where they moved since, at the end."""
    moments = [clocks for clocks in (machine.start, machine.end) if clocks is not None]
    said = (
        _moved("CPU", [c.cpu_mhz for c in moments], " MHz"),
        _moved("governor", [c.cpu_governor for c in moments]),
        _moved("GPU", [c.gpu_sm_mhz for c in moments], " MHz"),
        _moved("GPU memory", [c.gpu_memory_mhz for c in moments], " MHz"),
        _moved("GPU temperature", [c.gpu_temperature_c for c in moments], " °C"),
        _moved("load average", [c.load_average for c in moments]),
    )
    if any(said):
        yield f"clocks: {', '.join(filter(None, said))}"
    for when, clocks in zip(("start", "end"), moments, strict=False):
        if clocks.gpu_throttled is not None:
            yield f"WARNING: the GPU was held down at the {when}: {clocks.gpu_throttled}"


def _moved(what: str, values: Sequence[float | str | None], unit: str = "") -> str:
    known = [value for value in values if value is not None]
    words = [v if isinstance(v, str) else f"{v:,.0f}" if unit else f"{v:.2f}" for v in known]
    return f"{what} {' then '.join(dict.fromkeys(words))}{unit}" if words else ""


def _measured_line(comparison: LatencyComparison) -> str:
    options = comparison.options
    rounds = count(max((len(v.samples_ms) for v in comparison.variants), default=0), "round")
    if any(v.settings and v.settings.engine == TRTEXEC for v in comparison.variants):
        return f"{rounds}, order rotated; one sample is the median of a pass"
    threads = "" if options.threads is None else f", {count(options.threads, 'thread')}"
    return (
        f"{rounds} in random order after {count(options.warmup, 'untimed run')} "
        f"of each variant{threads}, seed {options.seed}"
    )


def answer_lines(comparison: LatencyComparison) -> tuple[str, ...]:
    """The answer, its first line the one that was asked for; what was not measured behind it.

    Sparse against dense (two variants that differ in nothing else) wherever both ran. Then the
    fastest of all. Each says the noise of its engines; faster and slower are said only where that
    was measured.
    """
    ratios = comparison.ratios
    sparsity = [ratio for ratio in ratios if ratio.only_sparsity]
    lines = [*(_line(comparison, ratio) for ratio in sparsity), *_fastest(comparison)]
    lines = lines or [_line(comparison, ratio) for ratio in ratios] or [_nothing(comparison)]
    if comparison.partial is not None:
        lines.append(f"PARTIAL: {comparison.partial}")
    return (printable(lines[0]), *busy_lines(comparison), *map(printable, lines[1:]))


def _line(comparison: LatencyComparison, ratio: LatencyRatio) -> str:
    """How two variants differ, or why nothing is claimed, and the noise."""
    variant, baseline, where = _sides(ratio)
    where += _at(comparison, ratio.batch)
    why_not = why_no_difference(comparison, ratio)
    if why_not is not None:
        between = " between" if why_not in {NO_DIFFERENCE, TOO_NOISY} else ""
        said = f"{why_not}{between} {variant} and {baseline}{where}"
    elif own_noise(comparison, ratio) is None:
        said = f"time of {variant} / {baseline}{where} is {ratio_words(ratio)}"
    else:
        said = f"{variant} is {speed_up(ratio, f' than {baseline}{where}')}"
    return f"{said}; {noise_words(comparison, (ratio,))}"


def _at(comparison: LatencyComparison, batch: int | None) -> str:
    return f" at batch {batch}" if len(timed_batches(comparison)) > 1 else ""


def _fastest(comparison: LatencyComparison) -> Iterator[str]:
    """The best ratio over the baseline at each batch that has several, unless it was said."""
    for batch in timed_batches(comparison):
        ratios = over_baseline(comparison, batch)
        faster = [r for r in ratios if r.verdict is LatencyVerdict.FASTER]
        best = min(faster or ratios, key=lambda r: r.ratio, default=None)
        if best is None or len(ratios) == 1 or best.only_sparsity:
            continue
        if faster:
            yield f"fastest of {len(ratios) + 1} variants: {_line(comparison, best)}"
            continue
        others = count(len(ratios), "variant") + _at(comparison, batch)
        said = f"none of {others} was seen to be faster than {comparison.baseline}"
        reason = filter(None, [why_no_difference(comparison, best)])
        yield f"{': '.join([said, *reason])}; {noise_words(comparison, ratios)}"


def _nothing(comparison: LatencyComparison) -> str:
    timed = [v.name for v in comparison.variants if v.samples_ms]
    ran = [name for name in timed if not parse_variant_name(name).again]
    if len(ran) > 1:
        return f"nothing to compare: {', '.join(ran)} were not timed in the same rounds"
    return f"nothing to compare: only {ran[0]} ran" if ran else "nothing was measured"
