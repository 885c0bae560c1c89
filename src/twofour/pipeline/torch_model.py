"""The torch model of a run: loaded once, pruned in place, its weights saved and read back.

safetensors refuses tensors that share memory, so a tied weight is written under one of its keys
and the header's metadata maps the other keys to it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from twofour.eligibility.predict import not_covered_lines
from twofour.errors import BadInputError
from twofour.pipeline.sources.user_code import files_read
from twofour.records.pruning import LoadedWeights, PruneResult
from twofour.records.weights import ReasonCode
from twofour.store import atomic_file
from twofour.words import keys_listed

if TYPE_CHECKING:
    from torch import Tensor, nn

    from twofour.pipeline.sources.source import LoadedModule, TorchSource

_ANOTHER_MODEL = (
    "it must be the model that was pruned, in the type it had then; a source that gives another "
    "one needs another --out"
)


class TorchModel:
    """Gives the module dense or pruned, loading it only when a stage needs it.

    Only one copy of the weights is ever held: pruning is in place, and asking for the dense
    module after that loads the source again.
    """

    def __init__(self, source: TorchSource, note: Callable[[str], None]) -> None:
        self._source = source
        self._note = note
        self._loaded: LoadedModule | None = None
        self._pruned: Path | None = None
        self.data_files: Sequence[Path] = ()
        """What the source read when it was loaded last, its own code apart."""

    def dense(self) -> LoadedModule:
        """The module with the weights of the source."""
        if self._loaded is None or self._pruned is not None:
            from twofour.pruning.torch_layers import make_permanent

            self._loaded = None
            with files_read() as self.data_files:
                self._loaded = self._source.load()
            make_permanent(self._loaded.module)
            for text in self._loaded.notes:
                self._note(text)
            self._pruned = None
        return self._loaded

    def prune(self, prune: Callable[[LoadedModule], PruneResult], target: Path) -> PruneResult:
        """Let `prune` change the module, and save its state_dict to `target` (safetensors)."""
        loaded = self.dense()
        result = replace(prune(loaded), source=self._source.text)
        refuse_nothing_pruned(result)
        self._pruned = target
        with atomic_file(target) as temporary:
            save_tensors(loaded.module.state_dict(), temporary, first=_names(result))
        return result

    def pruned(self, weights: Path) -> LoadedModule:
        """The module with the weights that were saved, read back unless they are at hand."""
        loaded = self._loaded or self.dense()
        if self._pruned != weights:
            load_weights(loaded.module, weights)
            self._pruned = weights
        return loaded

    def release(self) -> None:
        """Let go of the module and its memory, which the engines' process needs next."""
        self._loaded = None
        self._pruned = None
        from twofour.pruning.torch_spill import give_back_memory

        give_back_memory()


def refuse_nothing_pruned(result: PruneResult) -> None:
    """Raise BadInputError where no weight was pruned: what follows would be a dense model."""
    if any(row.pruned for row in result.weights):
        return
    if not result.weights:
        raise BadInputError(
            "; ".join(
                (
                    f"{result.source} has no layer that could be pruned",
                    *not_covered_lines(result.not_covered),
                )
            ),
            hint="layers are Linear, Conv, ConvTranspose, MultiheadAttention and their sub-classes "
            "(in ONNX: Conv, ConvTranspose, Gemm, MatMul and Einsum with a constant weight)",
        )
    codes = Counter(row.reasons[0].code.value for row in result.weights if row.reasons)
    why = ", ".join(f"{code} {count}" for code, count in codes.most_common())
    excluded = {*codes} == {ReasonCode.EXCLUDED.value}
    raise BadInputError(
        f"none of the {len(result.weights)} weights of {result.source} is pruned: {why}",
        hint="leave fewer layers out"
        if excluded
        else "--include GLOB or --all-layers prunes what sparse math cannot use",
    )


def _names(result: PruneResult) -> frozenset[str]:
    return frozenset(row.weight.weight for row in result.weights if row.weight.weight is not None)


def save_tensors(state: Mapping[str, Tensor], target: Path, *, first: Collection[str] = ()) -> None:
    """Write tensors by key; of keys that share a tensor, one of `first` is written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    written: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for key in sorted(state, key=lambda k: (k not in first, k)):
        same = written.setdefault(_place(state[key]), key)
        if same != key:
            aliases[key] = same
    tensors = {key: state[key] for key in sorted(written.values())}
    try:
        save_file(_apart(tensors), str(target), metadata=aliases or None)
    except SafetensorError as error:  # a full disk, among others
        raise OSError(f"safetensors: {str(error).splitlines()[0]}") from error
    except KeyError as error:  # a type that the library's table has not, such as complex32
        odd = next((k for k, t in tensors.items() if t.dtype in error.args), None)
        if odd is None:
            raise
        kind = str(tensors[odd].dtype).removeprefix("torch.")
        raise BadInputError(
            f"{odd} holds values of type {kind}, which no .safetensors file has",
            hint="convert it, to float32 for example",
        ) from error
    _put_in_order(target)


def _put_in_order(file: Path) -> None:
    """The keys of the header's metadata by name: the library writes them as its hashes fall.

    Format: docs of safetensors, "Format": 8 bytes of length, the header in JSON, blanks behind it.
    """
    with file.open("r+b") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
        if len(header.get("__metadata__", ())) < 2:
            return
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= size, "the same texts, written as shortly"
        stream.seek(8)
        stream.write(text.ljust(size))


def load_weights(module: nn.Module, path: Path) -> LoadedWeights:
    """Fill every parameter and buffer of a module in place, or none of them.

    Weights that the module computes (parametrizations, weight norm, masks) become plain ones first:
    loading into their parts would leave the dense weight in force. Raises BadInputError when keys,
    shapes, types or ties do not fit.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    from twofour.pruning.torch_layers import make_permanent

    permanent = make_permanent(module)
    state = {k: v for k, v in module.state_dict().items() if isinstance(v, torch.Tensor)}
    try:
        with safe_open(str(path), framework="pt") as file:
            saved_as = _saved_as(state, set(file.keys()), file.metadata() or {}, path)
            for key, name in saved_as.items():  # all is checked before anything is changed
                _check_fits(state[key], file.get_tensor(name), key, path)
            _check_ties(state, saved_as, file.get_tensor, path)
            with torch.no_grad():
                for key, name in saved_as.items():
                    state[key].copy_(file.get_tensor(name))
    except (SafetensorError, OSError, RuntimeError) as error:
        raise BadInputError(f"cannot read {path}: {str(error).splitlines()[0]}") from error
    return LoadedWeights(
        path=str(path),
        keys=tuple(state),
        tied={key: name for key, name in saved_as.items() if key != name},
        made_permanent=permanent,
    )


def _saved_as(
    state: Mapping[str, Tensor], saved: set[str], aliases: Mapping[str, str], path: Path
) -> dict[str, str]:
    """Under which key of the file each tensor of the module lies."""
    places = {_place(tensor): key for key, tensor in state.items() if key in saved}
    found: dict[str, str] = {}
    missing: list[str] = []
    for key, tensor in state.items():
        same = places.get(_place(tensor))
        name = key if key in saved else aliases.get(key, same)
        if name is None or name not in saved:
            missing.append(key)
        else:
            found[key] = name
    unexpected = sorted(saved - {*found.values()})
    if missing or unexpected:
        words = (("missing", missing), ("not in the model", unexpected))
        said = "; ".join(f"{word}: {keys_listed(keys)}" for word, keys in words if keys)
        raise BadInputError(f"{path} does not fit the model: {said}", hint=_ANOTHER_MODEL)
    return found


def _check_ties(
    state: Mapping[str, Tensor],
    saved_as: Mapping[str, str],
    read: Callable[[str], Tensor],
    path: Path,
) -> None:
    """One tensor of the module cannot hold two that differ."""
    import torch

    first: dict[tuple[object, ...], str] = {}
    for key, name in saved_as.items():
        other = first.setdefault(_place(state[key]), key)
        if saved_as[other] != name and not torch.equal(read(saved_as[other]), read(name)):
            raise BadInputError(
                f"{path}: {other} and {key} differ, and are one tensor in the model",
                hint="untie them in the model before you load the weights",
            )


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """The tensors of a torch checkpoint (.pt, .pth, .bin), read without running its code.

    A state_dict, or a dict that has one under "state_dict" or "model". Raises BadInputError for a
    damaged file, a pickle that wants to call something, and a file without tensors.
    """
    import torch

    from twofour.pipeline.sources.checkpoint import load_pickle

    content = load_pickle(path)
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping):
        content = {}
    tensors = {str(k): v for k, v in content.items() if isinstance(v, torch.Tensor)}
    if not tensors:
        raise BadInputError(f"{path} holds no tensors by name", hint="save model.state_dict()")
    for key, tensor in tensors.items():
        _check_plain(tensor, key, path)
    _refuse_blown_up(tensors, path)
    return tensors


def _check_plain(tensor: Tensor, key: str, path: Path) -> None:
    """Raise BadInputError unless the values lie in memory one by one."""
    import torch

    what = None
    if any("\ud800" <= letter <= "\udfff" for letter in key):
        raise BadInputError(f"{path}: the name {key[:80]!r} of a tensor is no text")
    if tensor.is_meta:
        what = "has no values (it is on the meta device)"
    elif tensor.is_nested:
        what = "is a nested tensor"
    elif tensor.layout != torch.strided:
        what = f"is stored as {str(tensor.layout).removeprefix('torch.')}"
    elif tensor.is_quantized:
        what = f"is quantised ({str(tensor.dtype).removeprefix('torch.')})"
    elif tensor.numel() and not _has_storage(tensor):
        what = "has no values"
    if what is not None:
        raise BadInputError(
            f"{path}: {key} {what}", hint="save the state_dict of a module with dense weights"
        )


def _has_storage(tensor: Tensor) -> bool:
    try:
        return tensor.untyped_storage().nbytes() > 0
    except (RuntimeError, NotImplementedError):  # what torch says of tensors without any
        return False


def _refuse_blown_up(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Views (an expanded zero) make gigabytes out of a small file once each is written apart."""
    from twofour.pipeline.sources.checkpoint import ALWAYS_READ_BYTES

    once = {_place(tensor): tensor for tensor in tensors.values()}
    size = sum(tensor.numel() * tensor.element_size() for tensor in once.values())
    stored = path.stat().st_size
    if size > 2 * stored + ALWAYS_READ_BYTES:
        raise BadInputError(
            f"{path} has {stored} bytes, its tensors would take {size}: they are views",
            hint="save contiguous tensors: {k: v.contiguous() for k, v in state_dict.items()}",
        )


def _check_fits(target: Tensor, saved: Tensor, key: str, path: Path) -> None:
    if (target.shape, target.dtype) != (saved.shape, saved.dtype):
        raise BadInputError(
            f"{path}: {key} is {list(saved.shape)} {saved.dtype}, the model has "
            f"{list(target.shape)} {target.dtype}",
            hint=_ANOTHER_MODEL,
        )


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Equal for tensors that are the same view of the same memory."""
    if tensor.numel() == 0:
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous, and copied where two different views still share memory."""
    seen: set[int] = set()
    apart: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        whole = tensor.is_contiguous() and memory not in seen
        apart[key] = tensor if whole else tensor.clone().contiguous()
        seen.add(memory)
    return apart
