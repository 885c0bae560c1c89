"""Trains a pruned module until it gives the dense module's outputs again, its zeros held.

No labels are needed: the loss is the squared distance to the dense outputs, and to those of the
dense blocks, each as a share of its variance (hidden states: TinyBERT, arXiv 1909.10351, section
3.1). Both modules run as they are exported: no dropout, and batch norms keep their statistics.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils import _pytree as pytree

from twofour.calibrate.torch.blocks import parts_of
from twofour.errors import BadInputError
from twofour.pruning.torch.calls import Call, KeptCalls, Tree, copies, forward, put_back
from twofour.records.run import Finetuning, HeldOut
from twofour.records.weights import Pattern
from twofour.sources.checkpoint import load_pickle
from twofour.store import atomic_file
from twofour.training.masks import hold
from twofour.words import in_seconds, per_cent

LEARNING_RATE = 3e-4
_AVERAGED = 8
"""The weights that count are averages of about the last eighth of the steps, in which chance evens
out (polynomial-decay averaging: Shamir and Zhang, ICML 2013, section 3)."""
_WARM_UP = 0.05
"""Part of the time in which the learning rate rises."""
_MEASUREMENTS = 20
_PATIENCE = 4
"""Measurements without a better one, after which training begins again at the best weights."""
_SLOWER = 3.0
"""What the learning rate is divided by then."""
_MOST_RETURNS = 2
_MOST_HELD_OUT = 16
"""Batches that are held out: more would take much of the time."""
_CHECKPOINT_S = 60.0
_TABLES = (nn.Embedding, nn.EmbeddingBag)
"""Their weights stay as they are: pruning left them, and their steps take time and memory."""
Report = Callable[[str, int, int | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTask:
    """How long to train, and where checkpoints go."""

    pattern: Pattern
    minutes: float
    seed: int = 0
    checkpoint: Path | None = None
    key: str = ""
    """sha256 over what a checkpoint depends on: another one is not used."""
    report: Report = lambda *_: None
    clock: Callable[[], float] = time.monotonic


@dataclass(slots=True, kw_only=True)
class _State:
    """How far training has come; it is a part of each checkpoint."""

    steps: int = 0
    seconds: float = 0.0
    measured: list[tuple[int, float, float]] = field(default_factory=list)
    """Step, seconds and distance of each measurement."""
    best: int = 0
    """Place of the best one in `measured`."""
    since: int = 0
    """Measurements since the best one, or since training began again there."""
    returns: int = 0
    averaged: int = 0
    """Steps in the average of the weights."""


class Distillation:
    """A pruned module, the dense one, and how far training has come."""

    def __init__(
        self, student: nn.Module, dense: nn.Module, calls: KeptCalls, task: TrainingTask
    ) -> None:
        """Raises BadInputError for a module that is not pruned, and fewer than two batches."""
        if len(calls) < 2:
            raise BadInputError(
                "training needs at least two batches: one of them is held out",
                hint="give more samples: hundreds are few, thousands are better",
            )
        self._student, self._dense, self._calls, self._task = student, dense, calls, task
        tables = {
            p for part in student.modules() if isinstance(part, _TABLES) for p in part.parameters()
        }
        trained = (p for p in student.parameters() if p.is_floating_point() and p not in tables)
        self._parameters = [*trained]
        for parameter in self._parameters:
            parameter.requires_grad_(True)
        self._optimizer = AdamW(self._parameters, lr=0.0, weight_decay=0.0, fused=True)
        self._holder = hold(student, self._optimizer, task.pattern)
        holders = {student.get_submodule(n.rpartition(".")[0]) for n in self._holder.weights}
        there = {path for path, _ in dense.named_modules()}
        self.blocks = tuple(path for path in parts_of("", student, holders) if path in there)
        every = max(2, len(calls) // _MOST_HELD_OUT, min(10, len(calls)))
        self.held_out = range(every - 1, len(calls), every)
        self._training = [n for n in range(len(calls)) if n not in self.held_out]
        self._state = _State()
        self._best, self._average = (copies(self._parameters) for _ in range(2))
        self._began = self._saved = 0.0

    def run(self) -> Finetuning:
        """Train for the time that is left; the student ends with the best measured weights.

        Raises BadInputError where a forward fails, and where the modules give other outputs.
        """
        with _evaluation(self._student, self._dense):
            self._resume()
            self._began = self._task.clock() - self._state.seconds
            self._saved = self._state.seconds
            stopped = None
            while stopped is None and self._share < 1.0:
                if self._share * _MEASUREMENTS >= len(self._state.measured):
                    stopped = self._measure()
                    continue
                self._step()
                self._state.seconds = self._task.clock() - self._began
                self._say()
                if self._state.seconds >= self._saved + max(
                    _CHECKPOINT_S, self._state.seconds / 20
                ):
                    self._save()
            if stopped is None:
                self._measure()
        put_back(self._best)
        self._holder.make_permanent()
        return self._record(stopped)

    @property
    def _share(self) -> float:
        """Part of the time that is over."""
        return self._state.seconds / (60 * self._task.minutes)

    @property
    def _rate(self) -> float:
        """The learning rate: it rises, then falls as a cosine to 0 at the end of the time."""
        share = min(self._share, 1.0)
        cosine = 0.5 * (1 + math.cos(math.pi * share))
        return LEARNING_RATE * min(1.0, share / _WARM_UP) * cosine / _SLOWER**self._state.returns

    def _step(self) -> None:
        """One step of the optimizer on one batch; every round has another order."""
        state, count = self._state, len(self._training)
        seed = self._task.seed + state.steps // count
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        number = self._training[int(order[state.steps % count])]
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate
        self._optimizer.zero_grad()
        outputs, blocks = self._distances(self._calls[number], number)
        torch.autograd.backward(outputs + blocks)
        self._optimizer.step()
        state.steps, state.averaged = state.steps + 1, state.averaged + 1
        for parameter, mean in self._average:
            mean.lerp_(parameter.detach(), (_AVERAGED + 1) / (_AVERAGED + state.averaged))

    def _distances(self, call: Call, number: int) -> tuple[Tensor, Tensor]:
        """How far the outputs are from the dense ones, and how far those of the blocks are."""
        with torch.no_grad():
            wanted = _outputs(self._dense, self.blocks, call, number)
        found = _outputs(self._student, self.blocks, call, number)
        means = []
        for kind in (False, True):
            distances = [
                _distance(found[place], tensor, call.padding)
                for place, tensor in wanted.items()
                if (place[0] != "") is kind
                and place in found
                and found[place].shape == tensor.shape
            ]
            if not distances and not kind:
                raise BadInputError(
                    "the pruned and the dense model have no output of one shape",
                    hint="name the dense model that this one was made from",
                )
            means.append(torch.stack(distances).mean() if distances else torch.zeros(()))
        return means[0], means[1]

    def _measure(self) -> str | None:
        """Measure the averaged weights on held-out batches; the reason to stop, if that is one.

        Where nothing got better for a while, training begins again at the best weights, slower.
        """
        state, now = self._state, copies(self._parameters)
        put_back(self._average)
        with torch.no_grad():
            found = [float(self._distances(self._calls[n], n)[0]) for n in self.held_out]
        distance = sum(found) / len(found)
        state.measured.append((state.steps, state.seconds, distance))
        better = state.steps == 0 or distance < state.measured[state.best][2]
        if better:
            state.best, self._best = len(state.measured) - 1, copies(self._parameters)
        state.since = 0 if better else state.since + 1
        if state.since < _PATIENCE:
            put_back(now)
            return None
        if state.returns == _MOST_RETURNS:
            return "held-out samples got no better, at a lower learning rate either"
        put_back(self._best)
        self._average = copies(self._parameters)
        state.since, state.returns, state.averaged = 0, state.returns + 1, 0
        self._optimizer.state.clear()
        return None

    def _say(self) -> None:
        state, total = self._state, 60 * self._task.minutes
        left = in_seconds(max(0.0, total - state.seconds))
        first, best = state.measured[0][2], state.measured[state.best][2]
        said = f"{per_cent(first)} -> {per_cent(best)} from the dense outputs, {left} left"
        self._task.report(f"step {state.steps:,}, {said}", int(state.seconds), int(total))

    def _save(self) -> None:
        """Write a checkpoint that is whole or not there."""
        self._saved = self._state.seconds
        if self._task.checkpoint is None:
            return
        content = {
            "key": self._task.key,
            "state": asdict(self._state),
            "weights": [parameter.detach() for parameter in self._parameters],
            "best": [values for _, values in self._best],
            "average": [values for _, values in self._average],
            "optimizer": self._optimizer.state_dict(),
            "masks": self._holder.state_dict(),
        }
        with atomic_file(self._task.checkpoint) as temporary:
            torch.save(content, temporary)

    def _resume(self) -> None:
        """Continue from the checkpoint, if it is of the same model, data and options."""
        file = self._task.checkpoint
        if file is None or not file.is_file():
            return
        content = load_pickle(file)
        if not isinstance(content, dict) or content.get("key") != self._task.key:
            return
        self._state = _State(**content["state"])
        put_back(zip(self._parameters, content["weights"], strict=True))
        self._best, self._average = (
            [*zip(self._parameters, content[kind], strict=True)] for kind in ("best", "average")
        )
        self._optimizer.load_state_dict(content["optimizer"])
        self._holder.load_state_dict(content["masks"])

    def _record(self, stopped: str | None) -> Finetuning:
        state = self._state
        return Finetuning(
            minutes=self._task.minutes,
            seconds=round(state.seconds, 1),
            steps=state.steps,
            measured=tuple(HeldOut(step=s, seconds=t, distance=d) for s, t, d in state.measured),
            best=state.best,
            stopped=stopped,
            weights=len(self._holder.weights),
            blocks=self.blocks,
        )


def _outputs(
    model: nn.Module, blocks: Sequence[str], call: Call, number: int
) -> dict[tuple[str, int], Tensor]:
    """The floating-point outputs of the model ("") and of its blocks, by path and place."""
    found: dict[tuple[str, int], Tensor] = {}

    def keep(path: str, tree: Tree) -> None:
        leaves = (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
        numbered = enumerate(leaf for leaf in leaves if leaf.is_floating_point())
        found.update({(path, place): leaf for place, leaf in numbered})

    with contextlib.ExitStack() as stack:
        for path in blocks:
            hook = functools.partial(lambda path, _m, _i, tree: keep(path, tree), path)
            handle = model.get_submodule(path).register_forward_hook(hook)
            stack.callback(handle.remove)
        keep("", forward(model, call, number))
    return found


def _distance(found: Tensor, wanted: Tensor, padding: Tensor | None) -> Tensor:
    """Squared distance as a share of the variance over samples, padding left out."""
    if padding is not None and wanted.shape[:2] == padding.shape:
        found, wanted = found[~padding], wanted[~padding]
    centre = wanted.mean(0) if len(wanted) > 1 else wanted.mean()
    variance = (wanted - centre).square().sum().clamp_min(torch.finfo(wanted.dtype).tiny)
    return (found - wanted).square().sum() / variance


@contextlib.contextmanager
def _evaluation(*models: nn.Module) -> Iterator[None]:
    """Have models in evaluation mode, and random states as they were afterwards."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng())
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        for part in (part for model in models for part in model.modules()):
            stack.callback(setattr, part, "training", part.training)
            part.training = False
        yield
