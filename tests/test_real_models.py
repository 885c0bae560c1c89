"""Real architectures at their full width, of few layers: prune, export, validate and run each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from support.exporting import export_onnx
from torch import Tensor, nn

from twofour.export.agreement import agreement
from twofour.export.calls import bind, input_arrays, reference_outputs
from twofour.graph.files import map_tensor
from twofour.graph.opened import open_onnx
from twofour.pattern import check
from twofour.pipeline.evidence_files import EvidenceFiles
from twofour.pipeline.reporting import report_files
from twofour.pruning.torch import find_module_weights, prune_module
from twofour.pruning.verify import validate_onnx
from twofour.records.eligibility import ShareUnit
from twofour.records.export import LayerMap
from twofour.records.options import ExportOptions, Precision
from twofour.records.weights import Pattern, PruneResult

transformers = pytest.importorskip("transformers")

TWO_FOUR = Pattern(2, 4)


@dataclass(frozen=True)
class Model:
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    weights: int
    """Weights of all its convolutions and matrix products, from the layers of one block."""
    dense: tuple[str, ...]
    """Layers that sparse math cannot use; every other one is pruned."""


def image() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(1, 3, 224, 224)}


def text() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 1000, (1, 16))}


def made(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    """What makes a model of transformers by the name of its class."""
    kind = getattr(transformers, name)
    return lambda: kind(kind.config_class(**sizes))


def resnet() -> nn.Module:
    """Batch norms with statistics as after training: folding multiplies zeros by both signs."""
    model = made("ResNetForImageClassification", num_labels=1000, depths=[1, 1, 1, 1])()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, mean=0.5, std=0.5)
            assert isinstance(module.running_mean, Tensor)
            assert isinstance(module.running_var, Tensor)
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model


MORE = ("convnext", "vit", "bert", "gpt2", "llama")
LLAMA = {
    "hidden_size": 1024,
    "intermediate_size": 2752,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "use_cache": False,
}
"""Llama 2 7B's proportions and its own attention, at a quarter of the width."""
DEPTHWISE = tuple(f"convnext.encoder.stages.{stage}.layers.0.dwconv" for stage in range(4))

MODELS = {
    "resnet": Model(resnet, image, 1 + 4 * 4 + 1, ("resnet.embedder.embedder.convolution",)),
    "convnext": Model(
        made("ConvNextForImageClassification", num_labels=1000, depths=[1, 1, 1, 1]),
        image,
        1 + 3 + 4 * 3 + 1,
        ("convnext.embeddings.patch_embeddings", *DEPTHWISE),
    ),
    "vit": Model(
        made("ViTForImageClassification", num_labels=1000, num_hidden_layers=2),
        image,
        1 + 2 * 6 + 1,
        ("vit.embeddings.patch_embeddings.projection",),
    ),
    "bert": Model(made("BertModel", num_hidden_layers=2), text, 2 * 6 + 1, ()),
    "gpt2": Model(
        made("GPT2LMHeadModel", use_cache=False, n_layer=2, vocab_size=1000),
        text,
        2 * 4 + 1,
        ("lm_head",),  # tied to the embedding, which pruning it would change too
    ),
    "llama": Model(made("LlamaForCausalLM", **LLAMA), text, 2 * 7 + 1, ()),
}


@dataclass(frozen=True)
class Done:
    expected: Model
    module: nn.Module
    inputs: dict[str, Tensor]
    pruned: PruneResult
    path: Path
    layers: LayerMap


@pytest.fixture(
    scope="module",
    params=["resnet", *(pytest.param(name, marks=pytest.mark.full) for name in MORE)],
    ids=str,
)
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Done:
    expected = MODELS[request.param]
    torch.manual_seed(0)
    module, inputs = expected.build().eval(), expected.inputs()
    pruned = prune_module(module, TWO_FOUR)
    path = tmp_path_factory.mktemp(request.param) / "sparse.onnx"
    layers = export_onnx(module, (), inputs, path, ExportOptions())
    return Done(expected, module, inputs, pruned, path, layers)


def layers_of(module: nn.Module) -> dict[str, tuple[nn.Module, int]]:
    """Layers with a weight, by path, with its reduction axis: found by class name alone."""
    axes = {"Linear": 1, "Conv2d": 1, "Conv1D": 0}
    return {
        path: (part, axes[type(part).__name__])
        for path, part in module.named_modules()
        if type(part).__name__ in axes
    }


def test_the_multiply_adds_are_those_that_the_modules_do(done: Done) -> None:
    done_by_hand: list[int] = []

    def hook(part: nn.Module, _: object, output: Tensor) -> None:
        width = output.shape[1 if isinstance(part, nn.Conv2d) else -1]
        done_by_hand.append(output.numel() * weight_of(part).size // width)

    hooks = [part.register_forward_hook(hook) for part, _ in layers_of(done.module).values()]
    with torch.no_grad():
        done.module(**done.inputs)
    for handle in hooks:
        handle.remove()
    report = report_files(EvidenceFiles(onnx=done.path)).report
    assert report.totals is not None
    totals = {share.unit: share.total for share in report.totals.shares}
    assert totals[ShareUnit.MULTIPLY_ADDS] == sum(done_by_hand)


def weight_of(part: nn.Module) -> Any:
    weight = part.get_parameter("weight")
    return weight.detach().numpy()


def test_every_weight_is_found_and_all_that_can_be_are_pruned(done: Done) -> None:
    expected = layers_of(done.module)
    assert len(expected) == done.expected.weights
    found = find_module_weights(done.module)
    assert {weight.layer for weight in found} == set(expected)
    dense = {row.weight.layer for row in done.pruned.weights if not row.pruned}
    assert dense == set(done.expected.dense)


def test_every_pruned_weight_holds_the_pattern_along_its_reduction_axis(done: Done) -> None:
    for path, (part, axis) in layers_of(done.module).items():
        weight = weight_of(part)
        if path in done.expected.dense:
            assert np.count_nonzero(weight) == weight.size, path
        else:
            result = check(weight, axis, TWO_FOUR)
            assert (result.violations, result.groups_checked) == (0, weight.size // 4), path
            assert 2 * np.count_nonzero(weight) == weight.size, path


def test_every_weight_of_the_file_is_named_after_its_module(done: Done) -> None:
    named = {row.layer: row.parameter for row in done.layers.layers}
    expected = {path: f"{path}.weight" for path in layers_of(done.module)}
    assert {layer: named.get(layer) for layer in expected} == expected
    state = done.module.state_dict(keep_vars=True)
    others = set(named.values()) - set(expected.values())
    assert all(name in dict(done.module.named_buffers()) for name in others)
    assert all(name in state for name in expected.values())


def test_the_file_still_holds_the_pattern_zero_for_zero(done: Done) -> None:
    state = dict(done.module.named_parameters(remove_duplicate=False))
    parameter_of = {row.initializer: row.parameter for row in done.layers.layers}
    pruned = {row.weight.layer for row in done.pruned.weights if row.pruned}
    required = {name for name, key in parameter_of.items() if key.rpartition(".")[0] in pruned}
    validation = validate_onnx(open_onnx(done.path), TWO_FOUR, required=required)
    assert validation.broken == ()
    checked = {row.weight for row in validation.checks if row.required and not row.violations}
    assert checked == required
    assert len(required) == done.expected.weights - len(done.expected.dense)
    found = open_onnx(done.path).weights()
    for weight, tensor in zip(found.weights, found.tensors, strict=True):
        if weight.weight in required and tensor is not None:
            stored = map_tensor(tensor, done.path) == 0
            ours = state[parameter_of[weight.weight]].detach().numpy() == 0
            if weight.op == "MatMul" and "Transpose" not in weight.trace:
                ours = ours.T
            np.testing.assert_array_equal(stored, ours, err_msg=weight.layer)


def test_the_file_computes_what_the_module_computes(done: Done) -> None:
    expected = reference_outputs(done.module, bind(done.module, (), done.inputs))
    session = onnxruntime.InferenceSession(done.path, providers=["CPUExecutionProvider"])
    arrays = input_arrays(bind(done.module, (), done.inputs))
    names = [i.name for i in session.get_inputs()]
    outputs = session.run(None, dict(zip(names, arrays, strict=True)))
    made = [output.name for output in session.get_outputs()]
    reference, compared = (dict(zip(made, each, strict=True)) for each in (expected, outputs))
    rows = agreement(reference, compared, bounds=Precision.FLOAT32)
    assert rows
    for row in rows:
        assert row.within, row
        assert row.row_cosine_min > 0.99999
