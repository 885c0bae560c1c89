"""The tokenizer of a checkpoint folder, or of one that lies beside an ONNX file; without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from twofour.pipeline.sources.source import import_extra

_NO_LIMIT = 1e18
"""Tokenizers without a limit say 10^30."""

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


def token_limit(stated: object) -> int | None:
    """A number of tokens as files state it; None for what is no such number."""
    if isinstance(stated, bool) or not isinstance(stated, (int, float)):
        return None
    return int(stated) if 0 < stated < _NO_LIMIT else None
