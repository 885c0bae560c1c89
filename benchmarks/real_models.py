"""Model sources at full size for `twofour`: Hugging Face architectures with random weights.

    twofour prune-export-build benchmarks/real_models.py:bert_base --out runs/bert

Each function gives a module and its example inputs; needs the extra hf.
"""

from __future__ import annotations

import torch
import transformers
from torch import Tensor, nn

Source = tuple[nn.Module, dict[str, Tensor]]


def resnet50() -> Source:
    config = transformers.ResNetConfig(num_labels=1000)
    return transformers.ResNetForImageClassification(config), _image()


def convnext_tiny() -> Source:
    config = transformers.ConvNextConfig(num_labels=1000)
    return transformers.ConvNextForImageClassification(config), _image()


def vit_base() -> Source:
    return transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000)), _image()


def bert_base() -> Source:
    return transformers.BertModel(transformers.BertConfig()), _text(128)


def gpt2() -> Source:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False)), _text(64)


def llama_of_4_layers() -> Source:
    """Llama 2 7B's proportions at a quarter of the width."""
    config = transformers.LlamaConfig(
        hidden_size=1024,
        intermediate_size=2752,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=8000,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config), _text(64)


def _image() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(1, 3, 224, 224)}


def _text(tokens: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 1000, (1, tokens))}
