"""Comparisons for the renderers: a run folder, a sweep that is partial, files, hostile names."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

from twofour.records.export import Gpu, OutputAgreement
from twofour.records.latency import (
    Clocks,
    ComparedVariant,
    LatencyComparison,
    LatencyRatio,
    LatencyVerdict,
    LayerContrast,
    LayerContrastRow,
    Machine,
    NoiseFloor,
    VariantSettings,
)
from twofour.records.options import CompareOptions

HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "a|b](javascript:alert(1))",
    "two\nlines\x1b[31m red",
    "[bold]x[/bold] {{ 7 * 7 }} `tick` \\ *e* _f_",
    "resnet50_fp16_" + "x" * 186,
    "\"><img src=x onerror='document.title=1'>&amp;",
)


def settings(name: str, precision: str = "float32", threads: int | None = 2) -> VariantSettings:
    """Settings of weights@engine:mode."""
    weights, _, rest = name.removesuffix(" again").rpartition("@")
    engine, _, mode = rest.partition(":")
    return VariantSettings(
        engine=engine,
        mode=mode,
        version={"onnxruntime": "1.23.2", "torch": "2.13.0"}.get(engine, "10.14.1"),
        device="CPU" if threads else "NVIDIA H200",
        model=f"{weights}.onnx",
        weights=weights,
        precision=precision,
        sparse_kernels=None,
        threads=threads,
        timing="one run, inputs and outputs in host memory",
    )


def variant(
    name: str,
    ms: float | None,
    *,
    batch: int | None = None,
    rounds: int = 50,
    second_mode: float | None = None,
) -> ComparedVariant:
    """A variant of this median; every tenth round is an outlier, `second_mode` a second peak."""
    chance = random.Random(f"{name} {ms} {batch}")
    samples: list[float] = []
    for number in range(rounds if ms is not None else 0):
        assert ms is not None
        factor = math.exp(chance.gauss(0, 0.012))
        factor *= 1.9 if number % 23 == 11 else 1.0
        factor *= second_mode if second_mode is not None and chance.random() < 0.4 else 1.0
        samples.append(round(ms * factor, 4))
    ranked = sorted(samples)
    median = statistics.median(samples) if samples else None
    return ComparedVariant(
        name=name + (f":b{batch}" if batch is not None else ""),
        samples_ms=tuple(samples),
        median_ms=median,
        p90_ms=ranked[math.ceil(0.9 * rounds) - 1] if samples else None,
        p99_ms=ranked[math.ceil(0.99 * rounds) - 1] if samples else None,
        throughput=(batch or 1) * 1e3 / median if median else None,
        peak_memory_bytes=round(210e6 + 3e6 * chance.random()) if samples else None,
        batch=batch,
        settings=settings(name) if samples else None,
        size_bytes=102_400_000 if samples else None,
        open_s=round(0.3 + chance.random(), 3) if samples else None,
    )


def ratio(
    variant: str,
    baseline: str,
    value: float,
    verdict: LatencyVerdict | None = None,
    *,
    batch: int | None = None,
    width: float = 0.02,
) -> LatencyRatio:
    """A ratio with an interval of +- `width`; faster or slower unless the verdict is given."""
    ends = "" if batch is None else f":b{batch}"
    same = variant.rpartition("@")[2] == baseline.rpartition("@")[2]
    said = LatencyVerdict.FASTER if value < 1 else LatencyVerdict.SLOWER
    undecided = verdict is LatencyVerdict.UNDECIDED
    return LatencyRatio(
        variant=variant + ends,
        baseline=baseline + ends,
        ratio=value,
        low=None if undecided else value * (1 - width),
        high=None if undecided else value * (1 + width),
        verdict=verdict or said,
        rounds=50,
        batch=batch,
        only_sparsity=same,
    )


def noise(name: str, floor: float, *, batch: int | None = None) -> NoiseFloor:
    """A baseline and its twin, whose interval reaches just as far as the floor."""
    ends = "" if batch is None else f":b{batch}"
    return NoiseFloor(
        variant=f"{name}{ends}",
        again=f"{name} again{ends}",
        ratio=1.001,
        low=1 / (1 + floor),
        high=1.004,
        floor=floor,
        batch=batch,
    )


def machine(*, gpu: bool = False) -> Machine:
    """Two cores whose clock fell; with a GPU that was held down."""
    start = Clocks(cpu_mhz=2900.4, cpu_governor="performance", load_average=0.31)
    end = replace(start, cpu_mhz=2400.0, load_average=2.02)
    if gpu:
        start = replace(start, gpu_sm_mhz=1980, gpu_memory_mhz=3201, gpu_temperature_c=41)
        end = replace(
            end, gpu_sm_mhz=1755, gpu_memory_mhz=3201, gpu_temperature_c=64, gpu_throttled="power"
        )
    h200 = Gpu(
        name="NVIDIA H200", compute_capability=(9, 0), memory_bytes=150_100_000_000, driver="570.1"
    )
    return Machine(
        platform="Linux 6.8 x86_64",
        python_version="3.11.9",
        cpu="Intel Xeon Platinum 8481C",
        cores=2,
        memory_bytes=16 << 30,
        gpu=h200 if gpu else None,
        packages=("numpy==2.2.6", "onnxruntime-gpu==1.23.2", "torch==2.13.0"),
        start=start,
        end=end,
    )


def agreement(error: float, cosine: float) -> OutputAgreement:
    """One output of 8 x 1000 scores."""
    return OutputAgreement(
        output="logits",
        shape=(8, 1000),
        max_abs_error=error,
        cosine=cosine,
        row_cosine_mean=cosine,
        row_cosine_min=cosine,
        relative_error=math.sqrt(max(0.0, 2 - 2 * cosine)),
        dense_largest=1.0,
    )


def run_folder() -> LatencyComparison:
    """Two engines with both weights, quantised and compiled ones, two rows that failed."""
    base = "dense@tensorrt:fp16"
    variants = (
        _with_outputs(variant(base, 4.31), 2e-4, 0.999999, top1=1.0, accuracy=0.761),
        _with_outputs(variant("sparse@tensorrt:fp16", 3.65), 0.213, 0.98712, 0.941, 0.748),
        variant(f"{base} again", 4.32),
        variant("dense@onnxruntime:cpu", 61.2),
        variant("sparse@onnxruntime:cpu", 61.1, second_mode=1.12),
        variant("dense@onnxruntime:cpu again", 61.3),
        _with_outputs(variant("dense@onnxruntime:int8", 28.4), 0.61, 0.9912, 0.93, 0.7525),
        variant("dense@torch:compile", 55.9, rounds=12),
        _failed(
            "sparse@torch:semi-structured-cusparselt",
            "no layer could be converted: 53 of 53 are convolutions",
            "2:4 kernels of torch are for linear layers",
        ),
        _failed("dense@torch-tensorrt:fp16", "torch_tensorrt is not installed", None),
    )
    ratios = (
        ratio("sparse@tensorrt:fp16", base, 0.8471),
        ratio("dense@onnxruntime:cpu", base, 14.2, width=0.05),
        ratio("sparse@onnxruntime:cpu", base, 14.3, width=0.05),
        ratio("dense@onnxruntime:int8", base, 6.59),
        ratio("dense@torch:compile", base, 12.9, LatencyVerdict.UNDECIDED),
        ratio(
            "sparse@onnxruntime:cpu", "dense@onnxruntime:cpu", 0.9985, LatencyVerdict.NO_DIFFERENCE
        ),
    )
    return LatencyComparison(
        source="runs/resnet50",
        baseline=base,
        machine=machine(gpu=True),
        options=CompareOptions(threads=2),
        variants=variants,
        ratios=ratios,
        noise=(noise(base, 0.008), noise("dense@onnxruntime:cpu", 0.021)),
        layers=(layers(40),),
        notes=("GPU kernels of TensorRT are timed with CUDA events; the CPU rows with its clock",),
    )


def sweep() -> LatencyComparison:
    """Dense and sparse in one engine, sparse the faster the larger the batch; dense in another."""
    sizes = (1, 8, 32)
    base, sparse, other = "dense@tensorrt:fp16", "sparse@tensorrt:fp16", "dense@torch:eager"
    variants, ratios, floors = [], [], []
    for number, batch in enumerate(sizes):
        gain = 1 - 0.08 * number
        variants += [
            variant(base, 1.2 * batch, batch=batch),
            variant(sparse, 1.2 * batch * gain, batch=batch),
            variant(f"{base} again", 1.2 * batch, batch=batch),
            variant(other, 1.5 * batch, batch=batch),
        ]
        verdict = None if number else LatencyVerdict.NO_DIFFERENCE
        ratios += [
            ratio(sparse, base, gain, verdict, batch=batch),
            ratio(other, base, 1.25, batch=batch),
        ]
        floors.append(noise(base, 0.01 + 0.002 * number, batch=batch))
    return LatencyComparison(
        source="runs/resnet50",
        baseline=base,
        machine=machine(),
        options=CompareOptions(threads=2, batches=sizes),
        variants=tuple(variants),
        ratios=tuple(ratios),
        noise=tuple(floors),
        partial="batch 32 ended after 12 of 50 rounds",
    )


def files() -> LatencyComparison:
    """Two ONNX files in one engine, without a twin, machine or notes."""
    return LatencyComparison(
        source="a.onnx b.onnx",
        baseline="a@onnxruntime:cpu",
        machine=None,
        options=CompareOptions(),
        variants=(variant("a@onnxruntime:cpu", 2.0), variant("b@onnxruntime:cpu", 2.5)),
        ratios=(ratio("b@onnxruntime:cpu", "a@onnxruntime:cpu", 1.25),),
        noise=(),
    )


def hostile() -> LatencyComparison:
    """Every text that comes from a file, an engine or a model is hostile."""
    base = f"{HOSTILE[0]}@onnxruntime:cpu"
    names = tuple(f"{text}@onnxruntime:cpu" for text in HOSTILE)
    some = LayerContrastRow(
        layer=HOSTILE[1],
        baseline_layer=HOSTILE[2],
        variant_ms=1.0,
        baseline_ms=2.0,
        ratio=0.5,
        difference_ms=-1.0,
    )
    return LatencyComparison(
        source=HOSTILE[1],
        baseline=base,
        machine=replace(machine(), cpu=HOSTILE[1], platform=HOSTILE[2], packages=HOSTILE),
        options=CompareOptions(),
        variants=(
            *(replace(variant(n, 2.0 + i / 4), metrics={n: 0.5}) for i, n in enumerate(names)),
            *(_failed(f"{n}2", n, n) for n in names),
        ),
        ratios=tuple(
            replace(ratio(name, base, 1.0 + number / 8), only_sparsity=False)
            for number, name in enumerate(names[1:], start=1)
        ),
        noise=(),
        layers=(
            LayerContrast(
                variant=names[1], baseline=base, variant_ms=1.0, baseline_ms=2.0, rows=(some,)
            ),
        ),
        partial=HOSTILE[2],
        notes=HOSTILE,
    )


def many() -> LatencyComparison:
    """One engine after the other with long names, from faster than the baseline to far slower."""
    base = "dense@onnxruntime:cpu"
    names = [f"sparse@torch:semi-structured-cusparselt-variant-{i:02}" for i in range(17)]
    values = [0.42 * 1.17**i for i in range(17)]
    return LatencyComparison(
        source="runs/many",
        baseline=base,
        machine=machine(),
        options=CompareOptions(),
        variants=(
            variant(base, 10.0),
            variant(f"{base} again", 10.0),
            *(variant(n, 10 * v) for n, v in zip(names, values, strict=True)),
        ),
        ratios=tuple(ratio(n, base, v) for n, v in zip(names, values, strict=True)),
        noise=(noise(base, 0.03),),
    )


def layers(number: int) -> LayerContrast:
    """Convolutions that are faster with sparse weights, the fewer the later; one slower layer."""
    rows = []
    for i in range(number):
        dense = 0.2 - 0.004 * i
        sparse = dense * (1.3 if i == 5 else 0.6)
        rows.append(_layer_row(f"/layer{i // 10}/conv{i % 10}/Conv", sparse, dense))
    rows.append(_layer_row("Reformatting CopyNode for Input Tensor 0", 0.031, None))
    ranked = sorted(rows, key=lambda r: -abs(r.difference_ms))
    return LayerContrast(
        variant="sparse@tensorrt:fp16",
        baseline="dense@tensorrt:fp16",
        variant_ms=sum(r.variant_ms or 0.0 for r in rows),
        baseline_ms=sum(r.baseline_ms or 0.0 for r in rows),
        rows=tuple(ranked),
    )


def _layer_row(name: str, variant_ms: float, baseline_ms: float | None) -> LayerContrastRow:
    return LayerContrastRow(
        layer=name,
        baseline_layer="" if baseline_ms is None else name,
        variant_ms=variant_ms,
        baseline_ms=baseline_ms,
        ratio=None if baseline_ms is None else variant_ms / baseline_ms,
        difference_ms=variant_ms - (baseline_ms or 0.0),
    )


def _with_outputs(
    made: ComparedVariant, error: float, cosine: float, top1: float, accuracy: float
) -> ComparedVariant:
    return replace(
        made,
        agreement=(agreement(error, cosine),),
        top1_agreement=top1,
        metrics={"accuracy": accuracy},
        peak_device_memory_bytes=310_000_000 if "tensorrt" in made.name else None,
    )


def _failed(name: str, error: str, hint: str | None) -> ComparedVariant:
    return replace(variant(name, None), error=error, hint=hint)


COMPARISONS = {
    "run_folder": run_folder(),
    "sweep": sweep(),
    "files": files(),
    "hostile": hostile(),
    "many": many(),
}
