"""Memory that is given back to the system when it is free."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest
import torch

from twofour.pipeline.torch.graph import give_back_memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_what_was_freed_between_what_is_kept_goes_back() -> None:
    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    tensors = [torch.ones(1 << 14) for _ in range(2000)]  # 64 KiB each, in the heap
    full = resident()
    tensors = tensors[::100]
    give_back_memory()
    assert resident() < full - (80 << 20)
