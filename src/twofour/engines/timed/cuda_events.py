"""CUDA events and the memory of the GPU, from the CUDA runtime library alone: no torch."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable

from twofour.engines.tensorrt.cudart import load_cuda_runtime
from twofour.errors import BuildFailedError, MissingToolError


def cuda_runtime() -> ctypes.CDLL:
    """The library that Polygraphy loads; raises MissingToolError where there is none."""
    from polygraphy import cuda
    from polygraphy.exception import PolygraphyException
    from polygraphy.logger import G_LOGGER

    try:
        with G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1):
            load_cuda_runtime()
        library: ctypes.CDLL = cuda.wrapper().handle
    except (OSError, PolygraphyException) as error:
        raise MissingToolError(
            f"the CUDA runtime library cannot be loaded: {str(error).splitlines()[0]}",
            hint="pip install nvidia-cuda-runtime, or put libcudart.so on LD_LIBRARY_PATH",
        ) from error
    return library


class CudaTimer:
    """Two events on a stream, which the GPU itself stamps; `close` frees them.

    Raises BuildFailedError with CUDA's words for any call that fails, an earlier kernel's included.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._start, self._end = ctypes.c_void_p(), ctypes.c_void_p()
        for event in (self._start, self._end):
            _check(library, library.cudaEventCreate(ctypes.byref(event)), "cudaEventCreate")

    def time_ms(self, stream: int, enqueue: Callable[[], None]) -> float:
        """Milliseconds (to half a microsecond) of what `enqueue` puts on the stream; waits for it.

        Resolution: CUDA runtime API, cudaEventElapsedTime.
        """
        library, queue, elapsed = self._library, ctypes.c_void_p(stream), ctypes.c_float()
        _check(library, library.cudaEventRecord(self._start, queue), "cudaEventRecord")
        enqueue()
        _check(library, library.cudaEventRecord(self._end, queue), "cudaEventRecord")
        _check(library, library.cudaEventSynchronize(self._end), "cudaEventSynchronize")
        status = library.cudaEventElapsedTime(ctypes.byref(elapsed), self._start, self._end)
        _check(library, status, "cudaEventElapsedTime")
        return elapsed.value

    def close(self) -> None:
        """Free the events; a failure is of no consequence any more."""
        for event in (self._start, self._end):
            if event:
                self._library.cudaEventDestroy(event)
                event.value = None


class DeviceMemory:
    """Growth of the GPU's memory in use since `watch`: weights, activations and libraries' own.

    From cudaMemGetInfo, which sees the whole GPU: what other processes take or give back meanwhile
    is counted too, and what is freed again between two looks is not seen.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._before = self._used()
        self._peak = 0

    @classmethod
    def watch(cls) -> DeviceMemory | None:
        """Start now, before the engine is loaded; None where the memory cannot be had."""
        with contextlib.suppress(MissingToolError, BuildFailedError, AttributeError):
            return cls(cuda_runtime())
        return None

    def look(self) -> None:
        """Take note of what is in use now; raises BuildFailedError where CUDA does not say."""
        self._peak = max(self._peak, self._used() - self._before)

    def peak_bytes(self) -> int | None:
        """The largest growth seen, this moment's included; None where CUDA does not say."""
        try:
            self.look()
        except BuildFailedError:
            return None
        return self._peak

    def _used(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        status = self._library.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
        _check(self._library, status, "cudaMemGetInfo")
        return total.value - free.value


def _check(library: ctypes.CDLL, status: int, call: str) -> None:
    if status == 0:
        return
    describe = library.cudaGetErrorString
    describe.restype = ctypes.c_char_p
    words = (describe(status) or b"no description").decode(errors="replace")
    raise BuildFailedError(f"{call} failed: {words} (CUDA error {status})")
