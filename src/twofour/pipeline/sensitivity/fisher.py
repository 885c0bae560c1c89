"""Fisher scores of the layers of a torch model: from the dense module and what was saved."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twofour.pipeline.sensitivity.measured_on import described_in, first_batches
from twofour.pipeline.sensitivity.units import Unit
from twofour.pipeline.stages import WEIGHTS, Run

if TYPE_CHECKING:
    from twofour.pipeline.sources.source import LoadedModule


def fisher_of(run: Run, units: Sequence[Unit]) -> dict[str, float]:
    """Scores by unit, from the dense module and the weights and biases that were saved."""
    from safetensors import safe_open

    from twofour.pruning.torch_fisher import PROBES, fisher_scores

    assert run.model is not None
    loaded = run.model.dense()
    state = dict(loaded.module.named_parameters(remove_duplicate=False))
    changes = {}
    with safe_open(str(run.file(WEIGHTS)), framework="pt") as file:
        saved = set(file.keys())
        for unit in units:
            keys = [key for key in _parameters(unit) if key in saved and key in state]
            changes[unit.name] = {key: file.get_tensor(key) - state[key].detach() for key in keys}
    calls = _calls(run, loaded)
    probes = -(-PROBES // len(calls))
    seed = run.options.seed
    found = [fisher_scores(loaded.module, c, changes, seed=seed, probes=probes) for c in calls]
    return {name: math.fsum(of[name] for of in found) / len(found) for name in found[0]}


def _calls(run: Run, loaded: LoadedModule) -> list[tuple[tuple[Any, ...], Mapping[str, Any]]]:
    """What the module is called with: the first calibration batches, else the example inputs."""
    from twofour.pipeline.sources.calibration.models import loaded_inputs
    from twofour.pipeline.sources.calibration.torch_calls import torch_call

    if run.options.calibration.data is None:
        return [(loaded.args, loaded.kwargs)]
    inputs = loaded_inputs(loaded, run.source.text, described_in(run))
    calls = (torch_call(loaded.module, batch) for batch in first_batches(run, inputs))
    return [(call.args, call.kwargs) for call in calls]


def _parameters(unit: Unit) -> Iterator[str]:
    """Keys of the weights that were pruned, and of the biases that may make up for them."""
    keys = dict.fromkeys(r.weight.weight for r in unit.rows if r.pruned and r.weight.weight)
    for key in keys:
        yield key
        if key.endswith("weight"):
            yield f"{key.removesuffix('weight')}bias"
