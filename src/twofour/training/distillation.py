"""Trains a pruned module until it gives the dense module's outputs again, its zeros held.

No labels are needed: the loss is the squared distance to the dense outputs, and to those of the
dense blocks, each as a share of its variance (hidden states: TinyBERT, arXiv 1909.10351, section
3.1). Both modules run as they are exported: no dropout, and batch norms keep their statistics.
"""

from __future__ import annotations

import contextlib
import functools
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from twofour.errors import BadInputError
from twofour.export.calls import without_fast_path
from twofour.export.model_code import described
from twofour.inputs.samples import BATCH_SAMPLES, Batch, CalibrationData
from twofour.records import frozen
from twofour.records.run import Finetuning, HeldOut
from twofour.records.weights import Pattern
from twofour.sources.calibration.kinds import calibration_record
from twofour.sources.calibration.loaders import Call, DiskStore, torch_call
from twofour.sources.checkpoint import load_pickle
from twofour.store import atomic_file
from twofour.training.masks import hold
from twofour.words import in_seconds, per_cent

LEARNING_RATE = 2e-4
_WHOLE_RATE = 1000
"""Steps in the whole time from which on the rate is the one above; fewer have less of it."""
_AVERAGED = 8
"""The weights that count are averages of about the last eighth of the steps, in which chance evens
out (polynomial-decay averaging: Shamir and Zhang, ICML 2013, section 3)."""
_WARM_UP = 0.05
"""Part of the time in which the learning rate rises."""
_BLOCKS = 0.5
"""What the blocks' outputs count beside the model's."""
_MEASUREMENTS = 20
_BETWEEN = 9
"""Time between two measurements, in times of one: training has at least 90 % of the time."""
_PATIENCE = 6
"""Measurements without a better one, after which training ends."""
_MOST_HELD_OUT = 16
"""Batches that are held out: more would take much of the time."""
_CHECKPOINT_S = 60.0
_DENSE_BYTES = 4 << 30
"""Limit of the dense outputs that are kept, or a quarter of the free disk if that is less."""
_ROUNDING = 4
"""Least deviation of outputs that differ among samples, in units of their last place."""
_TABLES = (nn.Embedding, nn.EmbeddingBag)
"""Their weights stay as they are: pruning left them, and their steps take time and memory."""


Place = tuple[str, int]
"""Path of the module ("": the model) and number among its floating-point outputs."""


def is_fast_in_bfloat16(flags: Mapping[str, Any]) -> bool:
    """Whether a processor with these capabilities (of `torch.cpu`) multiplies bfloat16 itself."""
    return any(flags.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def _has_bfloat16() -> bool:
    # torch before 2.11 does not list what the processor can do
    return is_fast_in_bfloat16(getattr(torch.cpu, "get_capabilities", dict)())


@frozen
class TrainingTask:
    """How long to train, and where checkpoints go."""

    pattern: Pattern
    minutes: float
    seed: int = 0
    checkpoint: Path | None = None
    key: str = ""
    """sha256 over what a checkpoint depends on: another one is not used."""
    resumes: bool = True
    """False: a checkpoint that is there is not used; the next one replaces it."""
    report: Callable[[str, int, int | None], None] = lambda *_: None
    note: Callable[[str], None] = lambda _: None
    clock: Callable[[], float] = time.monotonic
    bfloat16: bool = field(default_factory=_has_bfloat16)
    """Whether steps on a processor run the pruned module in it, if it can; all else is float32."""


def distil(
    student: nn.Module, dense: nn.Module, data: CalibrationData, task: TrainingTask
) -> Finetuning:
    """Train a pruned module in place; it ends with the weights that were best on held-out batches.

    Both are in evaluation mode afterwards. Raises BadInputError for a module that is not pruned,
    fewer than two batches, a forward that fails, and modules without an output of one shape.
    """
    if student is dense:
        raise BadInputError("model and dense are the same module", hint="load the dense one again")
    within = None if task.checkpoint is None else task.checkpoint.parent
    student.eval()
    dense.eval()
    batches = _Batches(data, within)
    training = _Training(student, dense, batches, task)
    stopped = training.run()
    held_out = sum(batches[number].samples for number in training.held_out)
    return Finetuning(
        train=replace(calibration_record(data), held_out=held_out),
        minutes=task.minutes,
        seconds=round(training.seconds, 1),
        steps=training.steps,
        measured=tuple(HeldOut(step=s, distance=d) for s, _, d in training.measured),
        best=training.best,
        stopped=stopped,
        weights=len(training.holder.weights),
        blocks=training.blocks,
        bfloat16=training.in_bfloat16,
    )


class _Batches:
    """Batches that were read once and are asked for in any order, and dense outputs for them."""

    def __init__(self, data: CalibrationData, folder: Path | None) -> None:
        self._store = DiskStore(folder)
        self._places = list(map(self._store.put, data.batches()))
        self._dense: dict[int, int] = {}
        """Number of a batch -> place of its dense outputs."""
        free_bytes = shutil.disk_usage(folder or tempfile.gettempdir()).free
        self.free_bytes = min(_DENSE_BYTES, free_bytes // 4)
        """Room for dense outputs."""

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> Batch:
        batch: Batch = self._store.get(self._places[number])
        return batch

    def dense(self, number: int, compute: Callable[[], dict[Place, Tensor]]) -> dict[Place, Tensor]:
        """The dense outputs for a batch, computed once if there is room to keep them."""
        if number in self._dense:
            kept: dict[Place, Tensor] = self._store.get(self._dense[number])
            return kept
        outputs = compute()
        size = sum(tensor.nbytes for tensor in outputs.values())
        if size <= self.free_bytes:
            self.free_bytes -= size
            self._dense[number] = self._store.put(outputs)
        return outputs


class _Training:
    """A pruned module, the dense one, and how far training has come."""

    def __init__(
        self, student: nn.Module, dense: nn.Module, batches: _Batches, task: TrainingTask
    ) -> None:
        self._student = student
        self._dense = dense
        self._kept = batches
        self._task = task
        self._weights = _trained(student)
        self._optimizer = torch.optim.AdamW(self._weights, weight_decay=0.0, fused=True)
        self.holder = hold(student, self._optimizer, task.pattern)
        pruned = {student.get_submodule(name.rpartition(".")[0]) for name in self.holder.weights}
        there = dict(dense.named_modules())
        self.blocks = tuple(filter(there.__contains__, blocks_of("", student, pruned)))
        self.held_out = _held_out(len(batches))
        self._batches = [at for at in range(len(batches)) if at not in self.held_out]
        self._best = _copies(self._weights)
        self._average = _copies(self._weights)
        self.steps = 0
        self.seconds = 0.0
        self.best = 0
        self.measured: list[tuple[int, float, float]] = []
        """Step, seconds and distance on held-out batches."""
        self.in_bfloat16 = False

    def _choose_for_device(self) -> None:
        """A GPU is faster than files; a processor may be faster in bfloat16, if the module can."""
        if self._weights[0].device.type != "cpu":
            self._kept.free_bytes = 0
        elif self._task.bfloat16:
            with contextlib.suppress(BadInputError):
                self._distances(self._batches[0], in_bfloat16=True)
                self.in_bfloat16 = True

    def run(self) -> str | None:
        """Train for the time that is left; the reason why it ended before, if it did."""
        self._choose_for_device()
        self._resume()
        total = 60 * self._task.minutes
        began = self._task.clock() - self.seconds
        saved = self.seconds
        took = 0.0
        stopped = None
        while stopped is None and self.seconds < total:
            pause = max(total / _MEASUREMENTS, _BETWEEN * took)
            if not self.measured or self.seconds >= self.measured[-1][1] + pause:
                stopped = self._measure()
                took = self._task.clock() - began - self.seconds
            self._step(self.seconds / total)
            self.seconds = self._task.clock() - began
            self._report(total)
            if self.seconds >= saved + max(_CHECKPOINT_S, self.seconds / 20):
                self._save()
                saved = self.seconds
        if stopped is None:
            self._measure()
        _copy(self._best, self._weights)
        self.holder.make_permanent()
        return stopped

    def _report(self, total: float) -> None:
        left = in_seconds(max(0.0, total - self.seconds))
        first = per_cent(self.measured[0][2])
        best = per_cent(self.measured[self.best][2])
        text = f"step {self.steps:,}, {first} -> {best} from the dense outputs, {left} left"
        self._task.report(text, int(self.seconds), int(total))

    def _step(self, share: float) -> None:
        """One step of the optimizer on one batch; every round has another order.

        The learning rate rises, then falls as a cosine to 0 at the end of the time.
        """
        turn, place = divmod(self.steps, len(self._batches))
        generator = torch.Generator().manual_seed(self._task.seed + turn)
        number = self._batches[int(torch.randperm(len(self._batches), generator=generator)[place])]
        rate = min(1.0, share / _WARM_UP) * 0.5 * (1 + math.cos(math.pi * share))
        expected = self.steps / max(share, 1e-9)
        rate *= math.sqrt(min(1.0, expected / _WHOLE_RATE))
        for group in self._optimizer.param_groups:
            group["lr"] = rate * LEARNING_RATE
        self._optimizer.zero_grad()
        distances = self._distances(number, in_bfloat16=self.in_bfloat16)
        torch.autograd.backward(sum(distances, torch.zeros(())))
        self._optimizer.step()
        self.steps += 1
        part = (_AVERAGED + 1) / (_AVERAGED + self.steps)
        for weight, mean in zip(self._weights, self._average, strict=True):
            mean.lerp_(weight.detach(), part)

    def _distances(self, number: int, *, in_bfloat16: bool = False) -> list[Tensor]:
        """How far the outputs are from the dense ones, and how far those of the blocks are."""
        call = torch_call(self._student, self._kept[number])
        wanted = self._kept.dense(number, lambda: self._wanted(call))
        outputs = self._outputs(self._student, call, in_bfloat16=in_bfloat16)
        of_model: list[Tensor] = []
        of_blocks: list[Tensor] = []
        for place, tensor in wanted.items():
            if place in outputs and outputs[place].shape == tensor.shape:
                distances = of_blocks if place[0] in self.blocks else of_model
                distances.append(_distance(outputs[place], tensor, call.padding))
        if not of_model:
            raise BadInputError("the pruned and the dense model have no output of one shape")
        weighted = ((of_model, 1.0), (of_blocks, _BLOCKS))
        return [torch.stack(some).mean() * weight for some, weight in weighted if some]

    @torch.no_grad()
    def _wanted(self, call: Call) -> dict[Place, Tensor]:
        """The dense outputs; those of blocks in float16, where none is too large for it."""
        wanted = self._outputs(self._dense, call)
        for place, tensor in wanted.items():
            half = tensor.half()
            if place[0] and half.isfinite().all():
                wanted[place] = half
        return wanted

    def _outputs(
        self, model: nn.Module, call: Call, *, in_bfloat16: bool = False
    ) -> dict[Place, Tensor]:
        """The floating-point outputs of the model and of its blocks."""
        outputs: dict[Place, Tensor] = {}

        def keep(path: str, tree: object) -> None:
            leaves = (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
            floats = enumerate(leaf for leaf in leaves if leaf.is_floating_point())
            outputs.update({(path, place): leaf for place, leaf in floats})

        with contextlib.ExitStack() as stack:
            stack.enter_context(without_fast_path())
            for path in self.blocks:
                hook = functools.partial(lambda path, _m, _i, tree: keep(path, tree), path)
                handle = model.get_submodule(path).register_forward_hook(hook)
                stack.callback(handle.remove)
            if in_bfloat16:  # attention as plain products: fused, it is slower in bfloat16
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(described(f"{type(model).__name__}.forward fails in training:"))
            keep("", model(*call.args, **call.kwargs))
        return outputs

    @torch.no_grad()
    def _measure(self) -> str | None:
        """Measure the averaged weights on held-out batches; the reason to stop, if that is one."""
        now = _copies(self._weights)
        _copy(self._average, self._weights)
        distances = [float(self._distances(number)[0]) for number in self.held_out]
        distance = sum(distances) / len(distances)
        if not math.isfinite(distance):
            if not self.measured:
                raise BadInputError(
                    "outputs on held-out samples are NaN or infinite before the first step",
                    hint="look at what both models give: neither may give such outputs",
                )
            return "the outputs became infinite"
        self.measured.append((self.steps, self.seconds, distance))
        if distance < self.measured[self.best][2] or not self.steps:
            self.best = len(self.measured) - 1
            self._best = _copies(self._weights)
        _copy(now, self._weights)
        waited = len(self.measured) - 1 - self.best
        return None if waited < _PATIENCE else "held-out samples got no better"

    def _save(self) -> None:
        """Write a checkpoint that is whole or not there."""
        if self._task.checkpoint is not None:
            with atomic_file(self._task.checkpoint) as temporary:
                try:
                    torch.save({"key": self._task.key, **self._state()}, temporary)
                except RuntimeError as error:  # torch says "unexpected pos 843328 vs 843220"
                    raise OSError("the disk took only a part of it") from error

    def _state(self) -> dict[str, Any]:
        return {
            "weights": [weight.detach() for weight in self._weights],
            "best": self._best,
            "average": self._average,
            "optimizer": self._optimizer.state_dict(),
            "masks": self.holder.state_dict(),
            "progress": (self.steps, self.seconds, self.best, self.measured),
        }

    def _resume(self) -> None:
        """Continue from the checkpoint, if it is of the same model, data and options."""
        file = self._task.checkpoint
        if file is None or not file.is_file():
            return
        if not self._task.resumes:
            self._task.note(f"training starts anew; with --resume it continues at {file.name}")
            return
        try:
            state: Any = load_pickle(file)
            if state["key"] != self._task.key:
                why = "the checkpoint is of other weights, samples or options"
                self._task.note(f"training starts anew: {why}")
                return
            _copy(state["best"], self._best)
            _copy(state["average"], self._average)
            _copy(state["weights"], self._weights)
            self._optimizer.load_state_dict(state["optimizer"])
            self.holder.load_state_dict(state["masks"])
            self.steps, self.seconds, self.best, self.measured = state["progress"]
        except Exception as error:  # whatever a damaged one ends in
            hint = "without --resume training starts anew, from the pruned weights"
            raise BadInputError(f"the checkpoint {file} is damaged", hint=hint) from error
        self._task.note(f"training continues at step {self.steps:,}: a checkpoint was there")


def _trained(student: nn.Module) -> list[Tensor]:
    """Floating-point parameters but for those of embedding tables, with gradients."""
    tables = [part for part in student.modules() if isinstance(part, _TABLES)]
    fixed = set(chain.from_iterable(part.parameters() for part in tables))
    trained = (p for p in student.parameters() if p.is_floating_point() and p not in fixed)
    return [parameter.requires_grad_(True) for parameter in trained]


def _held_out(count: int) -> range:
    """Numbers of the batches that are held out; raises BadInputError for fewer than two batches."""
    # of 2 batches number 1; of 50 numbers 1, 11, 21, 31, 41; of 320 every 20th
    held_out = range(1, count, max(2, min(10, count), count // _MOST_HELD_OUT))
    if not held_out:
        hint = f"give hundreds of samples; a batch has {BATCH_SAMPLES}, or what the model fixes"
        raise BadInputError("training needs two batches", hint=hint)
    return held_out


def _copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


@torch.no_grad()
def _copy(values: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    for tensor, target in zip(values, targets, strict=True):
        target.copy_(tensor)


def _distance(outputs: Tensor, wanted: Tensor, padding: Tensor | None) -> Tensor:
    """Squared distance as a share of the variance over samples, padding left out.

    Outputs that are the same for all samples have no variance but rounding: then it is a share of
    their squares, or of ones where all are zero.
    """
    if padding is not None and wanted.shape[:2] == padding.shape:
        outputs = outputs[~padding]
        wanted = wanted[~padding]
    precision = torch.finfo(wanted.dtype).eps
    wanted = wanted.to(torch.promote_types(wanted.dtype, torch.float32))
    centre = wanted.mean(0) if len(wanted) > 1 else wanted.mean()
    squares = wanted.square().sum()
    variance = (wanted - centre).square().sum()
    rounding = squares * (_ROUNDING * precision) ** 2
    size = torch.where(variance > rounding, variance, squares)
    size = torch.where(size > 0, size, max(1, wanted.numel()))
    return (outputs - wanted).square().sum() / size


_MOST_WEIGHTS = 16
"""Pruned weights in a block whose outputs are compared, at most."""


def blocks_of(path: str, block: nn.Module, holders: Collection[nn.Module]) -> dict[str, nn.Module]:
    """Disjoint parts of a block (path "": of the model) that have pruned weights, by path.

    `holders` are the modules of these weights.
    """
    # A BERT encoder of 12 layers with 6 Linears each has 72 weights: too many, so the search goes
    # on into its ModuleList, whose children of 6 are the blocks.
    blocks: dict[str, nn.Module] = {}
    for name, child in block.named_children():
        inner = f"{path}.{name}" if path else name
        weights = sum(part in holders for part in child.modules())
        if not weights or isinstance(child, torch.jit.ScriptModule):
            continue
        is_small = weights <= _MOST_WEIGHTS or not list(child.children())
        if is_small and type(child).forward is not nn.Module.forward:
            blocks[inner] = child
        else:
            blocks |= blocks_of(inner, child, holders)
    first: dict[nn.Module, str] = {}  # a module under several paths is one block
    for place, module in blocks.items():
        first.setdefault(module, place)
    return {place: module for module, place in first.items()}
