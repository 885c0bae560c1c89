"""A CUDA runtime library of our own: its clock and memory are set by the test."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

SOURCE = r"""
#include <stddef.h>
static float now = 0, stamps[8];
static int created = 0, destroyed = 0, failing = 0;
static size_t used = 1000;
void advance(float *ms) { now += *ms; }
void fail_with(int status) { failing = status; }
void use(size_t bytes) { used = bytes; }
int alive(void) { return created - destroyed; }
int cudaEventCreate(void **event) { *event = &stamps[created++ % 8]; return failing; }
int cudaEventRecord(void *event, void *stream) { *(float *)event = now; return failing; }
int cudaEventSynchronize(void *event) { return failing; }
int cudaEventDestroy(void *event) { destroyed++; return 0; }
int cudaEventElapsedTime(float *ms, void *start, void *end) {
    *ms = *(float *)end - *(float *)start;
    return 0;
}
int cudaMemGetInfo(size_t *free, size_t *total) {
    *total = 1 << 20;
    *free = *total - used;
    return failing;
}
const char *cudaGetErrorString(int status) {
    return status == 700 ? "an illegal memory access was encountered" : "another error";
}
"""


def fake_cudart(folder: Path) -> ctypes.CDLL:
    """Compiled anew for each folder, so that each has a state of its own."""
    source, target = folder / "cudart.c", folder / "libcudart_fake.so"
    source.write_text(SOURCE)
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", target, source], check=True)
    library = ctypes.CDLL(str(target))
    library.use.argtypes = [ctypes.c_size_t]
    return library


def advance(library: ctypes.CDLL, ms: float) -> None:
    """Let the GPU's clock go on."""
    library.advance(ctypes.byref(ctypes.c_float(ms)))
