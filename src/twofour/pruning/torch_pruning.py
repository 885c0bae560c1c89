"""A torch module pruned with calibration data: which weights and biases, and what is reported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from twofour.errors import BadInputError
from twofour.pruning.matrices import Layout, cut_where_wide
from twofour.pruning.methods import DEFAULT_WITH_DATA, left_to, method_named
from twofour.pruning.solve import Solved, solve_layers
from twofour.pruning.torch_calibration import (
    CalibratedWeight,
    Work,
    calibrate,
    calls_kept,
    fellow,
)
from twofour.pruning.torch_calls import Call, KeptCalls, copies, put_back
from twofour.pruning.torch_layers import StorageKey, is_plain, storage_key, tensor_of
from twofour.pruning.torch_module import Done, prune_module, zeros_of
from twofour.pruning.torch_products import Target
from twofour.pruning.torch_repair import DenseRecord, record_dense, repair_module
from twofour.pruning.torch_spill import give_back_memory
from twofour.records.options import MethodOptions, Selection
from twofour.records.pruning import Calibration, PruneResult, Repair
from twofour.records.weights import Pattern, Weight

_PLACES = {"q_proj_weight": 0, "k_proj_weight": 1, "v_proj_weight": 2}
"""Which third of its in_proj_bias belongs to a separate projection of MultiheadAttention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationCalls:
    """Calibration data as calls of the module, and what is to be said about them."""

    calls: Iterable[Call]
    """The same ones each time that they are gone through."""
    about: Calibration


@torch.inference_mode(False)  # under it nothing tells that a tensor was changed in place
def prune_calibrated(
    model: nn.Module, data: CalibrationCalls, work: Work, selection: Selection, source: str = ""
) -> PruneResult:
    """N:M in the model's own memory by a method that has data; then repair, unless it is unwanted.

    All or nothing: raises BadInputError like `prune_module`, like `calibrate`, and for data that
    the model cannot run on, pruned or not, with every weight and bias as it was.
    """
    _refuse_inference_tensors(model)
    name = work.options.name or DEFAULT_WITH_DATA
    with calls_kept(model, data.calls, work) as calls:
        by_data = _ByData(calls, work)
        try:
            result = prune_module(
                model,
                work.pattern,
                selection,
                source=source,
                method=left_to(name),
                by_data=by_data,
            )
            repair = _repaired(model, by_data, calls, work)
        except BaseException:
            put_back(by_data.before)
            raise
    return replace(result, method=name, calibration=data.about, repair=repair)


class _ByData:
    """Prunes weights of a module with its calls, and remembers what they and its outputs were."""

    def __init__(self, calls: KeptCalls, work: Work) -> None:
        self._calls, self._work = calls, work
        self.before: list[tuple[Tensor, Tensor]] = []
        """What is changed, and copies from before."""
        self.dense: DenseRecord | None = None
        """None: nothing is pruned, or no repair is wanted."""

    def __call__(
        self, model: nn.Module, arrays: Sequence[tuple[Weight, Tensor]]
    ) -> Mapping[StorageKey, Done]:
        work, name = self._work, self._work.options.name or DEFAULT_WITH_DATA
        weights = [calibrated_weight(model, *array, work.pattern) for array in arrays]
        if not weights:
            return {}
        self.before = copies([t for w in weights for t in (w.target.tensor, *w.biases)])
        if work.options.repair is not False:
            by = model if work.reference is None else work.reference
            self.dense = record_dense(by, [weight for weight, _ in arrays], self._calls)
        if work.reference is not None and work.options.bias_correction:
            for weight in weights:
                _take_biases(model, weight, work.reference)
        solved = calibrate(model, weights, self._calls, work)
        return {
            storage_key(tensor): done_of(solved[weight.weight], tensor, name)
            for weight, tensor in arrays
            if weight.weight is not None and weight.weight in solved
        }


def _repaired(model: nn.Module, by_data: _ByData, calls: KeptCalls, work: Work) -> Repair | None:
    """What repair did to the pruned model; None: it is unwanted, or nothing was pruned."""
    if by_data.dense is None:
        return None
    if work.before_repair is not None:
        work.before_repair()
    give_back_memory()
    try:
        return repair_module(model, by_data.dense, calls, work.options.repair)
    except BadInputError as error:
        raise BadInputError(
            f"the pruned model cannot be repaired: {error.message}",
            hint="--no-repair (twofour.prune: repair=False) leaves it as pruning made it",
        ) from error


def _take_biases(model: nn.Module, weight: CalibratedWeight, reference: nn.Module) -> None:
    """The dense model's: what the correction adds is reckoned from its outputs.

    Raises BadInputError where the dense model has another weight in its place.
    """
    fellow(reference, weight.target.name, weight.target.tensor)
    state = model.state_dict()
    for bias in weight.biases:
        for name, tensor in state.items():
            if storage_key(tensor) == storage_key(bias):
                with torch.no_grad():
                    bias.copy_(fellow(reference, name, bias))


def _refuse_inference_tensors(model: nn.Module) -> None:
    """Torch lets nothing write to them outside of the mode."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and tensor.is_inference():
            raise BadInputError(
                f"{name} was made under torch.inference_mode, and cannot be changed outside of it",
                hint="make the model outside of it, or prune copy.deepcopy(model), made outside",
            )


def work_of(pattern: Pattern, options: MethodOptions) -> Work:
    """The method that the options name, with data; raises BadInputError for an unknown one.

    And for a refit or damping that no layer can be solved with: the data are not read yet.
    """
    method = method_named(options.name or DEFAULT_WITH_DATA)
    solve_layers((), method, options)
    return Work(pattern=pattern, method=method, options=options)


def layout_of(weight: Weight, m: int) -> Layout:
    """How a layer's stored weight lies in matrices; wide convolutions are cut into their taps."""
    assert weight.axis is not None
    if not weight.kernel:
        return Layout(shape=weight.shape, axis=weight.axis, m=m)
    return cut_where_wide(
        Layout(shape=weight.shape, axis=weight.axis, m=m, groups=weight.groups, convolution=True)
    )


def calibrated_weight(
    model: nn.Module, weight: Weight, tensor: Tensor, pattern: Pattern
) -> CalibratedWeight:
    """A row of `find_weights` with its array, its users and their biases."""
    assert weight.weight is not None
    layout = layout_of(weight, pattern.m)
    paths = [path for path in (weight.layer, *weight.tied_to) if path not in weight.looked_up_by]
    holders = tuple(dict.fromkeys(model.get_submodule(path) for path in paths))
    return CalibratedWeight(
        target=Target(name=weight.weight, tensor=tensor, layout=layout),
        holders=holders,
        biases=_biases(model, holders, tensor, weight.out_channels),
    )


def _biases(
    model: nn.Module, holders: Sequence[nn.Module], tensor: Tensor, outputs: int
) -> tuple[Tensor, ...]:
    """One of each user of a weight; () where one has none, or shares it with another layer."""
    found: list[Tensor] = []
    for module in holders:
        bias = _bias(module, tensor)
        if bias is None or not is_plain(bias) or bias.shape != (outputs,):
            return ()
        others = [
            other
            for other in model.modules()
            if other not in holders
            for stored in other.parameters(recurse=False)
            if stored.data_ptr() == bias.data_ptr()
        ]
        if others:
            return ()
        found.append(bias)
    return tuple({bias.data_ptr(): bias for bias in found}.values())


def _bias(module: nn.Module, tensor: Tensor) -> Tensor | None:
    """What the module adds to the products with this weight."""
    if not isinstance(module, nn.MultiheadAttention):
        return tensor_of(module, "bias")
    packed = tensor_of(module, "in_proj_bias")
    if packed is None or module.in_proj_weight is not None:
        return packed
    key = storage_key(tensor)
    third = next(
        (place for name, place in _PLACES.items() if storage_key(getattr(module, name)) == key),
        None,
    )
    return None if third is None else packed.chunk(3)[third]


def done_of(solved: Solved, tensor: Tensor, method: str) -> Done:
    """What is reported of a weight that a method with data has changed in place."""
    return Done(
        method=method,
        zeros=zeros_of(tensor),
        kept_magnitude=solved.kept_magnitude,
        held_before=solved.damping is None and solved.kept_magnitude == 1.0,
        output_error=solved.output_error,
        damping=solved.damping,
        refit_steps=solved.refit_steps,
        bias_corrected=solved.bias_change is not None,
        note=solved.note,
    )
