"""A torch module, timed, and its layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from twofour.engines.inputs import fit_inputs
from twofour.engines.protocol import Arrays, OpenOptions, TimedModel, Untyped
from twofour.engines.torch.modes import ENGINE, MODES, MakeReady, device_for, platform_options
from twofour.engines.torch.placed import (
    CPU,
    CUDA,
    XLA,
    Ready,
    TorchDevice,
    TorchProgram,
    quiet,
    timing_event,
    torch_errors,
)
from twofour.errors import BadInputError, BuildFailedError, MissingToolError
from twofour.records.build import LayerTime
from twofour.records.export import TensorShape
from twofour.records.latency import VariantSettings

if TYPE_CHECKING:
    import torch
    from torch import nn


_ROOT = "(model)"
"""Name of the module itself, whose own is empty."""


def module_times(
    module: nn.Module, device: TorchDevice, run: Callable[[], object], iterations: int
) -> tuple[LayerTime, ...]:
    """Mean time of each submodule without those inside it, in the order in which they end first.

    The times of all add up to the run. `run` must run the module; hooks make it slower.
    """
    watch = _Watch(device)
    with ExitStack() as stack:
        for name, part in module.named_modules():
            before, after = watch.hooks(name or _ROOT)
            stack.callback(part.register_forward_pre_hook(before).remove)
            stack.callback(part.register_forward_hook(after).remove)
        for _ in range(iterations):
            run()
    return tuple(
        LayerTime(name=name, mean_ms=ms / iterations) for name, ms in watch.own_ms().items()
    )


class _Watch:
    """Marks in time at the start and end of each submodule, read when all is over."""

    def __init__(self, device: TorchDevice) -> None:
        self._on_gpu = device.kind == CUDA
        self._open: list[tuple[str, Untyped, list[int]]] = []
        self._done: list[tuple[str, Untyped, Untyped, list[int]]] = []

    def hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        """What to call before and after the submodule of that name."""

        def before(*_: Any) -> None:  # noqa: ANN401  # of whatever arguments
            self._open.append((name, self._mark(), []))

        def after(*_: Any) -> None:  # noqa: ANN401
            opened, start, inner = self._open.pop()
            self._done.append((opened, start, self._mark(), inner))
            if self._open:
                self._open[-1][2].append(len(self._done) - 1)

        return before, after

    def own_ms(self) -> dict[str, float]:
        """Name -> milliseconds in it over all runs, those of the submodules inside taken off."""
        spans = [self._between(start, end) for _, start, end, _ in self._done]
        total: dict[str, float] = {}
        for (name, _, _, inner), span in zip(self._done, spans, strict=True):
            own = span - sum(spans[index] for index in inner)
            total[name] = total.get(name, 0.0) + own
        return total

    def _mark(self) -> Untyped:
        if not self._on_gpu:
            return time.perf_counter()
        event = timing_event()
        event.record()
        return event

    def _between(self, start: Untyped, end: Untyped) -> float:
        if not self._on_gpu:
            return float(end - start) * 1e3
        end.synchronize()
        return float(start.elapsed_time(end))


def open_torch(program: TorchProgram, mode: str, options: OpenOptions) -> TimedModel:
    """The program in a mode, run once on its example inputs; one at a time in a process.

    The module is changed in place, and settings of torch (threads, attention back ends, warnings)
    hold for the process until `close`. Raises BadInputError for a mode that there is not and names
    that do not fit, MissingToolError where the mode needs what this machine lacks, and
    BuildFailedError where the module cannot run in it.
    """
    if mode not in MODES:
        raise BadInputError(f"torch has no mode {mode!r}", hint=f"choose one of {', '.join(MODES)}")
    check_torch()
    return open_in(program, (ENGINE, mode), MODES[mode], lambda: device_for(mode), options)


def check_torch() -> None:
    """Raise MissingToolError where torch cannot be imported."""
    try:
        import torch  # noqa: F401  # only whether it is there
    except (ImportError, OSError) as error:
        raise MissingToolError(
            f"torch cannot be imported: {error}", hint="pip install torch"
        ) from error


def open_in(
    program: TorchProgram,
    name: tuple[str, str],
    make: MakeReady,
    device: Callable[[], TorchDevice],
    options: OpenOptions,
) -> TimedModel:
    """What `open_torch` does, for whatever `make` does to the program; `name` is engine, mode."""
    import torch

    inputs = program.inputs
    with ExitStack() as stack:
        stack.enter_context(quiet())
        with torch_errors(f"{':'.join(name)} cannot run {program.source}"):
            torch.set_num_threads(options.threads)
            ready = make(program, device(), stack)
            ready.placed.device.time_ms(lambda: ready.placed.run_example(ready.forward))
        settings = _settings(ready, name, options)
        return TimedTorch(ready, settings, inputs, stack.pop_all())


class TimedTorch:
    """Meets TimedModel; made by `open_torch`."""

    def __init__(
        self,
        ready: Ready,
        settings: VariantSettings,
        inputs: tuple[TensorShape, ...],
        stack: ExitStack,
    ) -> None:
        self._ready: Ready | None = ready
        self._settings = settings
        self._inputs = inputs
        self._stack = stack
        self._run: Callable[[], object] | None = None
        self._what = f"{settings.engine}:{settings.mode} failed while running {settings.model}"

    @property
    def settings(self) -> VariantSettings:
        """As they were when the variant was opened."""
        return self._settings

    @property
    def inputs(self) -> tuple[TensorShape, ...]:
        """Those of the exported file."""
        return self._inputs

    @property
    def size_bytes(self) -> int | None:
        """None: a torch variant is loaded from no file of its own."""
        return None

    def prepare(self, inputs: Arrays) -> None:
        """Put the inputs on the device in the types and layout of the mode, and run once."""
        import torch

        ready = self._opened
        if ready.placed.device.kind == CUDA:
            torch.cuda.reset_peak_memory_stats()
        with self._errors(inputs):
            self._run = self._bound(inputs)
            ready.placed.device.time_ms(self._run)  # waits, so that a GPU's errors show up here

    def run_ms(self) -> float:
        """One call of forward; what it spans is in `settings.timing`."""
        assert self._run is not None, "prepare comes first"
        with torch_errors(self._what):
            return self._opened.placed.device.time_ms(self._run)

    def outputs(self, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
        """Every tensor that forward returns, floats as float32."""
        program = self._opened.placed.program
        with self._errors(inputs):
            tensors = program.outputs(self._bound(inputs)())
            arrays = [_as_array(tensor) for tensor in tensors]
        return dict(zip(program.output_names, arrays, strict=True))

    def layer_times(self, iterations: int) -> tuple[LayerTime, ...]:
        """Times of the submodules; () for what was compiled or traced into one piece, and XLA."""
        ready = self._opened
        if ready.layers is None or ready.placed.device.kind == XLA:
            return ()
        assert self._run is not None, "prepare comes first"
        with torch_errors(self._what):
            return module_times(ready.layers, ready.placed.device, self._run, iterations)

    def peak_device_memory_bytes(self) -> int | None:
        """Most memory in tensors since `prepare`, as torch's allocator counts it."""
        import torch

        on_gpu = self._opened.placed.device.kind == CUDA
        return int(torch.cuda.max_memory_allocated()) if on_gpu else None

    def close(self) -> None:
        """Let go of the module and put torch's settings back."""
        if self._ready is not None:
            import torch

            on_gpu = self._ready.placed.device.kind == CUDA
            self._ready = self._run = None
            self._stack.close()
            if on_gpu:
                torch.cuda.empty_cache()

    @property
    def _opened(self) -> Ready:
        assert self._ready is not None, "it was closed"
        return self._ready

    def _bound(self, inputs: Arrays) -> Callable[[], object]:
        import torch

        ready = self._opened
        fitted = fit_inputs(inputs, self._inputs)
        given = [torch.from_numpy(_writable(fitted[tensor.name])) for tensor in self._inputs]
        args, kwargs = ready.placed.program.arguments(ready.placed.put(given))
        return partial(_without_gradients, partial(ready.forward, *args, **kwargs))

    @contextmanager
    def _errors(self, inputs: Arrays) -> Iterator[None]:
        """A failure with other shapes than the example's is the inputs' fault, not the mode's."""
        try:
            with torch_errors(self._what):
                yield
        except BuildFailedError as error:
            shapes = {name: tuple(np.shape(array)) for name, array in inputs.items()}
            if error.hint is not None or shapes == self._example_shapes():
                raise
            raise BadInputError(
                f"{error.message} (inputs {_in_words(shapes)})",
                hint=f"it runs with {_in_words(self._example_shapes())}",
            ) from error

    def _example_shapes(self) -> dict[str, tuple[int, ...]]:
        program = self._opened.placed.program
        return {
            name: tuple(tensor.shape)
            for name, tensor in zip(program.input_names, program.tensors, strict=True)
        }


def _without_gradients(run: Callable[[], object]) -> object:
    import torch

    with torch.inference_mode():
        return run()


def _settings(ready: Ready, name: tuple[str, str], options: OpenOptions) -> VariantSettings:
    import torch

    device = ready.placed.device
    return VariantSettings(
        engine=name[0],
        mode=name[1],
        version=str(torch.__version__),
        device=device.name,
        model=ready.placed.program.source,
        weights=options.weights,
        precision=ready.precision,
        sparse_kernels=ready.sparse_kernels,
        threads=options.threads if device.kind == CPU else None,
        timing=device.timing,
        options=(*ready.options, *platform_options(device)),
    )


def _as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    plain = tensor.detach().cpu()
    array: npt.NDArray[Any] = (plain.float() if plain.is_floating_point() else plain).numpy()
    return np.ascontiguousarray(array).reshape(array.shape)


def _writable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """An array that torch does not warn of because it could not write to it."""
    return array if array.flags.writeable else array.copy()


def _in_words(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(
        f"{name} {'x'.join(map(str, shape)) or 'scalar'}" for name, shape in shapes.items()
    )
