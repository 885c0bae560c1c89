"""What a latency comparison says in words: its answer, its pairs, noise, machine and notes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from twofour.latency.noise import QUIET, TOO_BUSY, floor_at, is_too_busy, own_floor, widened
from twofour.records.export import Gpu
from twofour.records.latency import (
    SPARSITY_OFF,
    Clocks,
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
from twofour.words import count, ratio_word, ratio_words, span, speed_up

TRTEXEC = "trtexec"
"""VariantSettings.engine of what was timed elsewhere: a sample is the median of a pass."""
NO_DIFFERENCE = LatencyVerdict.NO_DIFFERENCE.value
TOO_NOISY = "the noise hides any difference"
TOO_FEW = "too few rounds to compare"
MACHINE_TOO_BUSY = "the machine is too busy to compare"
UNSTEADY = "the times are too unsteady to compare"
HOST_BOUND = "bound by the host"
_TOO_NOISY = 0.1
"""Noise floor above which "no difference" would hide one that matters; a choice, not measured."""
_GIB = 1 << 30


def timed_batches(comparison: LatencyComparison) -> tuple[int | None, ...]:
    """Batches at which anything was measured, in the order of the variants."""
    return tuple(dict.fromkeys(v.batch for v in comparison.variants if v.samples_ms))


def timed_variants(comparison: LatencyComparison, batch: int | None) -> tuple[ComparedVariant, ...]:
    """Variants with samples at this batch."""
    return tuple(v for v in comparison.variants if v.samples_ms and v.batch == batch)


def with_sparse_kernels(comparison: LatencyComparison) -> set[str]:
    """Names of the variants whose engine may use sparse kernels."""
    names: set[str] = set()
    for variant in comparison.variants:
        if variant.settings is not None and variant.settings.sparse_kernels:
            names.add(variant.name)
    return names


def noise_of(comparison: LatencyComparison, batch: int | None) -> NoiseFloor | None:
    """The baseline against its twin at this batch; other engines may have noise of their own."""
    for noise in comparison.noise:
        if noise.batch == batch and without_batch(noise.variant) == comparison.baseline:
            return noise
    return None


def over_baseline(comparison: LatencyComparison, batch: int | None) -> tuple[LatencyRatio, ...]:
    """Ratios over the comparison's baseline at this batch."""
    ratios = (ratio for ratio in comparison.ratios if ratio.batch == batch)
    return tuple(r for r in ratios if without_batch(r.baseline) == comparison.baseline)


def within_engines(comparison: LatencyComparison, batch: int | None) -> tuple[LatencyRatio, ...]:
    """Ratios over another baseline than the comparison's: sparse over dense in one engine."""
    ratios = (ratio for ratio in comparison.ratios if ratio.batch == batch)
    return tuple(r for r in ratios if without_batch(r.baseline) != comparison.baseline)


def kernels_off_lines(comparison: LatencyComparison) -> Iterator[str]:
    """What engines with the zeros of the sparse model and no sparse kernels are for."""
    for name in dict.fromkeys(without_batch(variant.name) for variant in comparison.variants):
        if name.endswith(f":{SPARSITY_OFF}"):
            yield (
                f"{name} has the same zeros and no sparse kernels: a ratio over it is what the "
                "kernels alone gain"
            )


def pair_name(ratio: LatencyRatio) -> str:
    """What is divided by what, as short as it is clear; the batch is not in it.

    "sparse / dense in torch:eager" where both ran in one engine and mode, else both names.
    """
    variant, baseline, where = _sides(ratio)
    return f"{variant} / {baseline}{where}"


def _sides(ratio: LatencyRatio) -> tuple[str, str, str]:
    """Both names, or both weights and the engine and mode of both: " in torch:eager"."""
    # sparse@torch:eager over dense@torch:eager: "sparse", "dense", " in torch:eager"
    variant = parse_variant_name(ratio.variant)
    baseline = parse_variant_name(ratio.baseline)
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
    # 12 % of noise would hide a gain of 1.1x: then "no difference" is more than anyone knows
    floor = own_noise(comparison, ratio)
    if floor is None:
        floor = floor_at(comparison.noise, comparison.baseline, ratio.batch)
    return TOO_NOISY if floor is not None and floor > _TOO_NOISY else NO_DIFFERENCE


def own_noise(comparison: LatencyComparison, ratio: LatencyRatio) -> float | None:
    """The larger floor of the engines and modes of both at the batch; None: not measured."""
    return own_floor(comparison.noise, ratio.variant, ratio.baseline, ratio.batch)


def noise_words(comparison: LatencyComparison, ratios: Sequence[LatencyRatio]) -> str:
    """Smallest to largest noise of these ratios, as far as it was measured."""
    floors: list[float] = []
    for ratio in ratios:
        floor = own_noise(comparison, ratio)
        if floor is not None:
            floors.append(floor)
    return _noise(floors) if floors else "noise not measured"


def _noise(floors: Sequence[float]) -> str:
    return "noise over 100 %" if max(floors) > 1 else f"noise {span(floors)}"


def legend(comparison: LatencyComparison) -> str:
    """What a ratio is, which way it reads, and what "no difference" depends on."""
    rests_on = "reaches into the noise" if comparison.noise else "contains 1"
    line = (
        "time / baseline: the variant's time divided by the baseline's in the same round, the "
        "middle of all rounds, which need not be one median divided by the other; below 1 is "
        "faster. "
        f'"no difference": the interval {rests_on}'
    )
    withheld = dict.fromkeys(r.withheld.value for r in comparison.ratios if r.withheld is not None)
    if withheld:
        line += f'; "undecided": {", or ".join(withheld)}'
    if any(variant.is_host_bound for variant in comparison.variants):
        line += (
            f'; "{HOST_BOUND}": to start a run takes the CPU (host ms) more than half of the '
            "GPU's time, so deploy with a CUDA graph or a larger batch"
        )
    return line


def busy_lines(comparison: LatencyComparison) -> Iterator[str]:
    """One warning for each batch in whose rounds other processes took more than an idle system."""
    for load in comparison.loads:
        if load.part <= QUIET:
            continue
        took = f"{load.other_cores:.2f} of {count(load.cores, 'core')}"
        # widened by 0.05: a ratio from 0.952 to 1.050 may be noise
        most = 1 + widened(0.0, load)
        span_words = f"{ratio_word(1 / most)} to {ratio_word(most)}"
        means = f": a ratio from {span_words} on the CPU may be noise"
        if is_too_busy(load):
            means = (
                f"; above {100 * TOO_BUSY:.0f} % nothing is compared: run again on an idle machine"
            )
        during = f"during the rounds{_at_batch(load.batch)}"
        yield f"WARNING: other processes kept {took} busy {during}{means}"


def _at_batch(batch: int | None) -> str:
    return "" if batch is None else f" at batch {batch}"


def noise_lines(comparison: LatencyComparison) -> Iterator[str]:
    """How much a variant measured twice differs: the baseline, then those of other engines."""
    for noise in comparison.noise:
        # noise 0.8 %: dense@tensorrt:fp16, measured twice, gives the ratio 1.001 (0.992 to 1.004)
        low = ratio_word(1 / (1 + noise.floor))
        high = ratio_word(1 + noise.floor)
        floor = f"{_noise((noise.floor,))}{_at_batch(noise.batch)}"
        yield (
            f"{floor}: {without_batch(noise.variant)}, measured twice, gives "
            f"the ratio {ratio_words(noise)}, so a ratio from {low} to {high} may be noise"
        )


def machine_lines(comparison: LatencyComparison) -> tuple[str, ...]:
    """Processor, GPU, system and versions; clocks and load; rounds, warm-up, threads, seed."""
    machine = comparison.machine
    if machine is None:
        return (_measured_line(comparison),)
    processor = f"{machine.cpu}, {count(machine.cores, 'core')}"
    if machine.memory_bytes is not None:
        processor += f", {machine.memory_bytes / _GIB:.1f} GiB"
    parts = filter(None, (processor, _gpu(machine.gpu), machine.platform))
    versions = (f"Python {machine.python_version}", *machine.packages)
    return (
        " · ".join(parts),
        ", ".join(versions),
        *_clock_lines(machine),
        *_gpu_timings(comparison),
        _measured_line(comparison),
    )


def _gpu(gpu: Gpu | None) -> str:
    if gpu is None:
        return ""
    major, minor = gpu.compute_capability
    memory = f"{gpu.memory_bytes / _GIB:.0f} GiB"
    driver = "" if gpu.driver is None else f", driver {gpu.driver}"
    return f"{gpu.name} (compute capability {major}.{minor}, {memory}{driver})"


_CLOCKS: dict[str, tuple[str, Callable[[Clocks], object]]] = {
    "CPU {} MHz": ("{:,.0f}", lambda clocks: clocks.cpu_mhz),
    "governor {}": ("{}", lambda clocks: clocks.cpu_governor),
    "GPU {} MHz": ("{:,.0f}", lambda clocks: clocks.gpu_sm_mhz),
    "GPU memory {} MHz": ("{:,.0f}", lambda clocks: clocks.gpu_memory_mhz),
    "GPU temperature {} °C": ("{:,.0f}", lambda clocks: clocks.gpu_temperature_c),
    "load average {}": ("{:.2f}", lambda clocks: clocks.load_average),
}
"""The words for a figure, how it is written, and the figure: "CPU 3,400 then 2,100 MHz"."""


def _clock_lines(machine: Machine) -> Iterator[str]:
    """Clocks and load at the start and, where they moved since, at the end."""
    moments = [machine.start]
    if machine.end is not None:
        moments.append(machine.end)
    parts: list[str] = []
    for words, (number, read) in _CLOCKS.items():
        figures = map(read, moments)
        values = [number.format(figure) for figure in figures if figure is not None]
        if values:
            parts.append(words.format(" then ".join(dict.fromkeys(values))))
    if parts:
        yield f"clocks: {', '.join(parts)}"
    for when, clocks in zip(("start", "end"), moments, strict=False):
        if clocks.gpu_throttled is not None:
            yield f"WARNING: the GPU was held down at the {when}: {clocks.gpu_throttled}"


def _gpu_timings(comparison: LatencyComparison) -> dict[str, None]:
    """What samples on a GPU are, for engines that time how runs are started there."""
    lines: dict[str, None] = {}
    for variant in comparison.variants:
        if variant.settings is not None and variant.enqueue_ms is not None:
            lines[f"one sample on the GPU is the {variant.settings.timing}"] = None
    return lines


def _measured_line(comparison: LatencyComparison) -> str:
    most = max((len(variant.samples_ms) for variant in comparison.variants), default=0)
    rounds = count(most, "round")
    if any(v.settings and v.settings.engine == TRTEXEC for v in comparison.variants):
        return f"{rounds}, order rotated; one sample is the median of a pass"
    options = comparison.options
    warmup = count(options.warmup, "untimed run")
    line = f"{rounds} in random order after {warmup} of each variant"
    if options.threads is not None:
        line += f", {count(options.threads, 'thread')}"
    return f"{line}, seed {options.seed}"


# --- the answer -----------------------------------------------------------------------------------


def answer_lines(comparison: LatencyComparison) -> tuple[str, ...]:
    """The answer, its first line the one that was asked for; what was not measured behind it.

    Sparse against dense (two variants that differ in nothing else) wherever both ran. Then the
    fastest of all. Each says the noise of its engines; faster and slower are said only where that
    was measured.
    """
    ratios = comparison.ratios
    lines = [_line(comparison, ratio) for ratio in ratios if ratio.only_sparsity]
    lines += _fastest(comparison)
    if not lines:
        lines += (_line(comparison, ratio) for ratio in ratios)
    if not lines:
        lines.append(_nothing(comparison))
    if comparison.partial is not None:
        lines.append(f"PARTIAL: {comparison.partial}")
    return (lines[0], *busy_lines(comparison), *lines[1:])


def _line(comparison: LatencyComparison, ratio: LatencyRatio) -> str:
    """How two variants differ, or why nothing is claimed, and the noise."""
    # "sparse is 1.18x faster than dense in tensorrt:fp16 (1.16 to 1.20); noise 0.8 %"
    variant, baseline, where = _sides(ratio)
    where += _at(comparison, ratio.batch)
    why_not = why_no_difference(comparison, ratio)
    if why_not in {NO_DIFFERENCE, TOO_NOISY}:
        claim = f"{why_not} between {variant} and {baseline}{where}"
    elif why_not is not None:
        claim = f"{why_not} {variant} and {baseline}{where}"
    elif own_noise(comparison, ratio) is None:
        claim = f"time of {variant} / {baseline}{where} is {ratio_words(ratio)}"
    else:
        claim = f"{variant} is {speed_up(ratio, f' than {baseline}{where}')}"
    return f"{claim}; {noise_words(comparison, (ratio,))}"


def _at(comparison: LatencyComparison, batch: int | None) -> str:
    return f" at batch {batch}" if len(timed_batches(comparison)) > 1 else ""


def _fastest(comparison: LatencyComparison) -> Iterator[str]:
    """The best ratio over the baseline at each batch that has several, unless it was said."""
    for batch in timed_batches(comparison):
        ratios = over_baseline(comparison, batch)
        faster = [ratio for ratio in ratios if ratio.verdict is LatencyVerdict.FASTER]
        best = min(faster or ratios, key=lambda ratio: ratio.ratio, default=None)
        if best is None or len(ratios) == 1 or best.only_sparsity:
            continue
        if faster:
            yield f"fastest of {len(ratios) + 1} variants: {_line(comparison, best)}"
            continue
        # "none of 4 variants was seen to be faster than dense@onnxruntime:cpu: the noise hides ..."
        others = count(len(ratios), "variant") + _at(comparison, batch)
        line = f"none of {others} was seen to be faster than {comparison.baseline}"
        why_not = why_no_difference(comparison, best)
        if why_not:
            line += f": {why_not}"
        yield f"{line}; {noise_words(comparison, ratios)}"


def _nothing(comparison: LatencyComparison) -> str:
    timed = [variant.name for variant in comparison.variants if variant.samples_ms]
    ran = [name for name in timed if not parse_variant_name(name).again]
    if not ran:
        return "nothing was measured"
    if len(ran) == 1:
        return f"nothing to compare: only {ran[0]} ran"
    return f"nothing to compare: {', '.join(ran)} were not timed in the same rounds"
