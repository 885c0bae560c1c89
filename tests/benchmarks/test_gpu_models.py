"""The models of the GPU benchmark against those of transformers, and their 2:4 weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from gpu_matrix.encoders import Bert, VisionTransformer
from gpu_matrix.layers import Size
from gpu_matrix.llama import LlamaBlock
from gpu_matrix.models import make_model, parameters
from gpu_matrix.plan import SHAPES
from gpu_matrix.weights import two_four


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_the_two_larger_of_every_four_weights_stay() -> None:
    weight = torch.tensor([[1.0, -4.0, 3.0, 2.0, 0.5, 0.25, -0.75, 0.1]])
    assert two_four(weight).tolist() == [[0, -4, 3, 0, 0.5, 0, -0.75, 0]]
    ties = two_four(torch.ones(8, 16, dtype=torch.int8))
    assert ties.dtype == torch.int8
    assert ties.reshape(-1, 4).sum(dim=1).tolist() == [2] * 32


def test_the_models_have_the_sizes_of_the_published_ones() -> None:
    with torch.device("meta"):
        sizes = {name: make_model(name, smoke=False) for name, _ in SHAPES}
        vit = transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000))
        bert = transformers.BertModel(transformers.BertConfig())
    assert parameters(sizes["vit-base"]) == parameters(vit) == 86_567_656
    assert parameters(sizes["bert-base"]) == parameters(bert) == 109_482_240
    # per layer 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096, and the last norm
    assert parameters(sizes["llama-7b-block"]) == 2 * 202_383_360 + 4096


def copy_parts(target: Any, source: Any, names: dict[str, str]) -> None:
    """Weights of submodules by name."""
    for ours, theirs in names.items():
        state = source.get_submodule(theirs).state_dict()
        target.get_submodule(ours).load_state_dict(state)


def randomize(model: torch.nn.Module) -> None:
    """Also norms and tokens, which start at 1 and 0."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def test_bert_gives_what_that_of_transformers_gives() -> None:
    config = transformers.BertConfig(
        vocab_size=50, intermediate_size=64, max_position_embeddings=16, **WIDTHS
    )
    theirs = transformers.BertModel(config).eval()
    randomize(theirs)
    ours = Bert(Size(32, 2, 4, 64, 1e-12, 50, 16))
    parts = {"words": "word_embeddings", "positions": "position_embeddings", "norm": "LayerNorm"}
    parts = {k: f"embeddings.{v}" for k, v in parts.items()} | {"pooler": "pooler.dense"}
    parts["types"] = "embeddings.token_type_embeddings"
    for index in range(2):
        for mine, other in {
            "query": "attention.self.query",
            "key": "attention.self.key",
            "value": "attention.self.value",
            "output": "attention.output.dense",
            "attention_norm": "attention.output.LayerNorm",
            "up": "intermediate.dense",
            "down": "output.dense",
            "output_norm": "output.LayerNorm",
        }.items():
            parts[f"layers.{index}.{mine}"] = f"encoder.layer.{index}.{other}"
    copy_parts(ours, theirs, parts)
    tokens = torch.randint(50, (3, 11))
    hidden, pooled = ours(tokens)
    expected = theirs(tokens)
    torch.testing.assert_close(hidden, expected.last_hidden_state, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pooled, expected.pooler_output, rtol=1e-4, atol=1e-5)


def llama_pair() -> tuple[Any, Any]:
    config = transformers.LlamaConfig(
        vocab_size=8, intermediate_size=48, max_position_embeddings=16, **WIDTHS
    )
    theirs = transformers.LlamaModel(config).eval()
    randomize(theirs)
    ours = LlamaBlock(Size(32, 2, 4, 48, 1e-6, positions=16))
    parts = {"norm": "norm"}
    for index in range(2):
        for mine, other in {
            "query": "self_attn.q_proj",
            "key": "self_attn.k_proj",
            "value": "self_attn.v_proj",
            "output": "self_attn.o_proj",
            "attention_norm": "input_layernorm",
            "norm": "post_attention_layernorm",
            "gate": "mlp.gate_proj",
            "up": "mlp.up_proj",
            "down": "mlp.down_proj",
        }.items():
            parts[f"layers.{index}.{mine}"] = f"layers.{index}.{other}"
    copy_parts(ours, theirs, parts)
    return ours, theirs


def test_llama_gives_what_that_of_transformers_gives_for_a_prompt() -> None:
    ours, theirs = llama_pair()
    x = torch.randn(2, 9, 32)
    expected = theirs(inputs_embeds=x).last_hidden_state
    torch.testing.assert_close(ours(x)[0], expected, rtol=1e-4, atol=1e-5)


def test_llama_decodes_one_token_as_the_last_of_the_prompt() -> None:
    ours, theirs = llama_pair()
    x = torch.randn(2, 9, 32)
    past = theirs(inputs_embeds=x[:, :-1], use_cache=True).past_key_values
    room = torch.zeros(2, 4, 1, 8)
    cache = [
        torch.cat((part, room), dim=2)
        for layer in past.layers
        for part in (layer.keys, layer.values)
    ]
    expected = theirs(inputs_embeds=x).last_hidden_state[:, -1:]
    torch.testing.assert_close(ours(x[:, -1:], *cache)[0], expected, rtol=1e-4, atol=1e-5)


def test_vit_gives_what_that_of_transformers_gives() -> None:
    config = transformers.ViTConfig(intermediate_size=64, num_labels=1000, **WIDTHS)
    theirs = transformers.ViTForImageClassification(config).eval()
    randomize(theirs)
    ours = VisionTransformer(Size(32, 2, 4, 64, 1e-12, positions=197))
    ours.load_state_dict({vit_name(name): value for name, value in theirs.named_parameters()})
    images = torch.randn(2, 3, 224, 224)
    torch.testing.assert_close(ours(images)[0], theirs(images).logits, rtol=1e-4, atol=1e-4)


VIT_NAMES = {
    "embeddings.cls_token": "class_token",
    "embeddings.position_embeddings": "positions",
    "embeddings.patch_embeddings.projection": "patches",
    "attention.q_proj": "query",
    "attention.k_proj": "key",
    "attention.v_proj": "value",
    "attention.o_proj": "output",
    "layernorm_before": "attention_norm",
    "layernorm_after": "output_norm",
    "mlp.fc1": "up",
    "mlp.fc2": "down",
    "layernorm": "norm",
    "classifier": "head",
}


def vit_name(theirs: str) -> str:
    """Our name of a parameter."""
    name = theirs.removeprefix("vit.")
    for old, new in VIT_NAMES.items():
        name = name.replace(old, new)
    return name
