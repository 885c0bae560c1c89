"""The tokenizer of a checkpoint folder, or of one that lies beside an ONNX file; without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from twofour.pipeline.sources.source import import_extra

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def open_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer, with a token to pad with; raises what transformers raises.

    And MissingToolError without transformers.
    """
    transformers = import_extra("transformers", "hf", "a tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    if tokenizer.pad_token is None:  # decoders have none; the mask hides whatever stands there
        tokenizer.pad_token = (
            tokenizer.eos_token or tokenizer.unk_token or tokenizer.convert_ids_to_tokens(0)
        )
    return tokenizer
