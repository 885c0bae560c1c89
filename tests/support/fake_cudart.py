"""A CUDA runtime library of our own: its clock and memory are set by the test.

Its functions are declared as in the headers of CUDA 11, 12 and 13: `against_header` compiles it
with one of them, so that a function that does not exist, or has other arguments, fails.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

TYPES = r"""
#ifndef __CUDA_RUNTIME_API_H__
typedef enum cudaError {
    cudaErrorInvalidValue = 1,
    cudaErrorIllegalAddress = 700,
    cudaErrorStreamCaptureInvalidated = 901,
} cudaError_t;
enum cudaStreamCaptureMode {
    cudaStreamCaptureModeThreadLocal = 1,
    cudaStreamCaptureModeRelaxed = 2,
};
typedef struct CUevent_st *cudaEvent_t;
typedef struct CUstream_st *cudaStream_t;
typedef struct CUgraph_st *cudaGraph_t;
typedef struct CUgraphExec_st *cudaGraphExec_t;
#endif
"""
STATE = r"""
#include <stddef.h>
static float now = 0, captured = 0, stamps[8], graphs[8];
static int events = 0, alive_things = 0, failing = 0, last = 0;
static int is_capturing = 0, is_invalid = 0, instantiated = 0, launched = 0;
static size_t used = 1000;
static cudaError_t answer(int status) {
    if (status) last = status;
    return status;
}
"""
CONTROLS = r"""
void advance(float *ms) { *(is_capturing ? &captured : &now) += *ms; }
void fail_with(int status) { failing = status; }
void use(size_t bytes) { used = bytes; }
void invalidate(void) { is_invalid = 1; }
int alive(void) { return alive_things; }
int capturing(void) { return is_capturing; }
int launches(void) { return launched; }
"""
RUNTIME = r"""
cudaError_t cudaEventCreate(cudaEvent_t *event) {
    *event = (cudaEvent_t)&stamps[events++ % 8];
    alive_things++;
    return answer(failing);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    *(float *)event = now;
    return answer(failing);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return answer(failing); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    alive_things--;
    return 0;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
    *ms = *(float *)end - *(float *)start;
    return 0;
}
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    *total = 1 << 20;
    *free = *total - used;
    return answer(failing);
}
const char *cudaGetErrorString(cudaError_t status) {
    return status == cudaErrorIllegalAddress ? "an illegal memory access was encountered"
                                             : "another error";
}
cudaError_t cudaGetLastError(void) {
    cudaError_t status = last;
    last = 0;
    return status;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    if (!mode) return answer(cudaErrorInvalidValue);
    is_capturing = 1;
    captured = is_invalid = 0;
    return answer(failing);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return answer(failing); }
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    is_capturing = 0;
    if (is_invalid) return answer(cudaErrorStreamCaptureInvalidated);
    *graph = (cudaGraph_t)&captured;
    alive_things++;
    return answer(failing);
}
cudaError_t cudaGraphInstantiateWithFlags(
        cudaGraphExec_t *ready, cudaGraph_t graph, unsigned long long flags) {
    float *made = &graphs[instantiated++ % 8];
    if (flags) return answer(cudaErrorInvalidValue);
    *made = *(float *)graph;
    *ready = (cudaGraphExec_t)made;
    alive_things++;
    return answer(failing);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t ready, cudaStream_t stream) {
    launched++;
    now += *(float *)ready;
    return answer(failing);
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t ready) {
    alive_things--;
    return 0;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    alive_things--;
    return 0;
}
"""
# nvcc's own; in the runtime's header they only decorate
DECORATIONS = """
#define __host__
#define __device__
#define __cudart_builtin__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_device_builtin__
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __align__(n) __attribute__((aligned(n)))
#define CUDARTAPI
#define CUDARTAPI_CDECL
"""


def fake_cudart(folder: Path) -> ctypes.CDLL:
    """Compiled anew for each folder, so that each has a state of its own."""
    source, target = folder / "cudart.c", folder / "libcudart_fake.so"
    source.write_text(TYPES + STATE + CONTROLS + RUNTIME)
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", target, source], check=True)
    library = ctypes.CDLL(str(target))
    library.use.argtypes = [ctypes.c_size_t]
    return library


def against_header(header: Path, folder: Path, more: str = "") -> str:
    """What the compiler says of the functions here, and of `more`, beside cuda_runtime_api.h."""
    source = folder / "cudart.c"
    source.write_text(TYPES + STATE + RUNTIME + more)
    decorations = folder / "crt" / "host_defines.h"
    decorations.parent.mkdir(exist_ok=True)
    decorations.write_text(DECORATIONS)
    search = [f"-I{folder}", f"-I{header.parent}", "-include", header.name]
    command = ["gcc", "-fsyntax-only", "-Wmissing-prototypes", *search, str(source)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    return finished.stderr


def advance(library: ctypes.CDLL, ms: float) -> None:
    """Let the GPU's clock go on; what is captured, let take so long."""
    library.advance(ctypes.byref(ctypes.c_float(ms)))
