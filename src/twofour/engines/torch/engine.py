"""torch as an engine: which modes can run here, and a module timed in one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from twofour.engines.protocol import (
    Mode,
    ModeStatus,
    OpenRequest,
    TimedModel,
    Untyped,
    mode_statuses,
)
from twofour.engines.tensorrt.plan import MODES as TENSORRT_MODES
from twofour.engines.torch.modes import MODES, Ready, check_compiler
from twofour.engines.torch.program import (
    CPU,
    CUDA,
    TorchDevice,
    TorchProgram,
    best_device,
    torch_errors,
    without_warnings,
)
from twofour.errors import (
    BadInputError,
    BuildFailedError,
    MissingToolError,
    TwofourError,
    first_line,
)
from twofour.inputs.fits import Arrays, fit_inputs, float32_array, shapes_of
from twofour.records.export import EngineStatus, LayerTime, TensorShape
from twofour.records.latency import VariantSettings

if TYPE_CHECKING:
    import torch
    from torch import nn

_WIDTH = 64
"""The least that every 2:4 kernel in float16 takes, and a width of heads that flash takes."""
_ROOT = "(model)"
"""Name of the module itself, whose own is empty."""


class TorchEngine:
    """Opens torch modules; there is nothing that it could build from ONNX."""

    name = "torch"
    modes = tuple(
        Mode(name=name, needs_sparse=name.startswith("semi-structured")) for name in MODES
    )
    open_levels: tuple[str, ...] = ()

    def status(self) -> EngineStatus:
        """Whether torch can be imported."""
        status = EngineStatus(engine=self.name, version=None, can_run=False, why_not=None)
        try:
            version, device = self._found()
        except TwofourError as error:
            return replace(status, why_not=error.message, hint=error.hint)
        return replace(status, version=version, can_run=True, device=device.name)

    def statuses(self, modes: Sequence[str]) -> tuple[ModeStatus, ...]:
        """Each tried, torch.compile only as far as its compiler, which would take seconds."""
        found = self.status()
        if not found.can_run:
            return mode_statuses(found, modes)
        import torch

        threads = torch.get_num_threads()
        try:
            return tuple(self._tried(mode, threads) for mode in modes)
        finally:
            torch.set_num_threads(threads)

    def open(self, request: OpenRequest) -> TimedModel:
        """A module in a mode, run once on its example inputs; one at a time in a process.

        The module is changed in place, and settings of torch (threads, attention back ends,
        warnings) are those of the process until `close`. Raises what `Engine.open` raises.
        """
        mode, program = request.mode, request.program
        _check_torch()
        import torch

        with ExitStack() as stack:
            stack.enter_context(without_warnings())
            with torch_errors(f"{self.name}:{mode} cannot run {program.source}"):
                torch.set_num_threads(request.threads)
                ready = MODES[mode].make(program, stack)
                ready.device.time_ms(ready.run_example)
            settings = _settings(ready, self.name, request)
            return TimedTorch(replace(ready, closing=stack.pop_all()), settings)

    def _tried(self, mode: str, threads: int) -> ModeStatus:
        program = probe_program()
        probe = OpenRequest(
            mode=mode, weights="probe", threads=threads, model="", precision="", program=program
        )
        try:
            with torch_errors(f"{self.name}:{mode} does not run"), without_warnings():
                if mode == "compile":
                    check_compiler()
                else:
                    self.open(probe).close()
        except TwofourError as error:
            return ModeStatus(engine=self.name, mode=mode, why_not=error.message, hint=error.hint)
        return ModeStatus(engine=self.name, mode=mode, why_not=None)

    def _found(self) -> tuple[str, TorchDevice]:
        """Version and device; raises MissingToolError where it lacks what it needs."""
        _check_torch()
        import torch

        return str(torch.__version__), best_device()


class TorchTensorRtEngine(TorchEngine):
    """A row that says what is missing: torch-tensorrt needs a GPU to be written for."""

    name = "torch-tensorrt"
    modes = TENSORRT_MODES

    def statuses(self, modes: Sequence[str]) -> tuple[ModeStatus, ...]:
        """No mode can run."""
        return mode_statuses(self.status(), modes)

    def _found(self) -> tuple[str, TorchDevice]:
        raise MissingToolError(
            "twofour does not run torch-tensorrt: there was no GPU to try it on",
            hint="export the model and build it with TensorRT",
        )


def _check_torch() -> None:
    try:
        importlib.import_module("torch")
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingToolError(
            f"torch cannot be imported: {first_line(error)}", hint="pip install torch"
        ) from error


def probe_program() -> TorchProgram:
    """A convolution, a 2:4 Linear layer and an attention, with two rows of zeros."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(8, 8, 3, padding=1)
            self.linear = nn.Linear(_WIDTH, _WIDTH)
            self.linear.weight.data *= torch.tensor([1.0, 1.0, 0.0, 0.0]).repeat(_WIDTH // 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = self.linear(self.convolution(x).flatten(2)).unsqueeze(1)
            return functional.scaled_dot_product_attention(rows, rows, rows)

    return TorchProgram(
        module=Probe(),
        args=(torch.zeros(2, 8, 8, 8),),
        kwargs={},
        inputs=(TensorShape(name="x", dtype="float32", shape=(2, 8, 8, 8)),),
        output_names=("y",),
        source="a small module",
    )


class TimedTorch:
    """Meets TimedModel; made by `TorchEngine.open`."""

    size_bytes: int | None = None
    """A torch variant is loaded from no file of its own."""

    def __init__(self, ready: Ready, settings: VariantSettings) -> None:
        self.settings = settings
        self.inputs = ready.program.inputs
        self._opened = ready
        self._run: Callable[[], object] | None = None
        self._what = f"{settings.engine}:{settings.mode} failed while running {settings.model}"

    def prepare(self, inputs: Arrays) -> None:
        """Put the inputs on the device in the types and layout of the mode, and run once."""
        import torch

        device = self._opened.device
        if device.kind == CUDA:
            torch.cuda.reset_peak_memory_stats()
        with self._errors(inputs):
            self._run = self._bound(inputs)
            device.time_ms(self._run)  # waits, so that a GPU's errors show up here

    def run_ms(self) -> float:
        """One call of forward; what it spans is in `settings.timing`."""
        assert self._run is not None, "prepare comes first"
        with torch_errors(self._what):
            return self._opened.device.time_ms(self._run)

    def outputs(self, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
        """Every tensor that forward returns, floats as float32."""
        program = self._opened.program
        with self._errors(inputs):
            tensors = program.outputs(self._bound(inputs)())
            arrays = [float32_array(tensor) for tensor in tensors]
        return dict(zip(program.output_names, arrays, strict=True))

    def layer_times(self, iterations: int) -> tuple[LayerTime, ...]:
        """Times of the submodules; () for what was compiled or traced into one piece."""
        ready = self._opened
        if ready.layers is None:
            return ()
        assert self._run is not None, "prepare comes first"
        with torch_errors(self._what):
            return _module_times(ready.layers, ready.device, self._run, iterations)

    def peak_device_memory_bytes(self) -> int | None:
        """Most memory in tensors since `prepare`, as torch's allocator counts it."""
        import torch

        on_gpu = self._opened.device.kind == CUDA
        return int(torch.cuda.max_memory_allocated()) if on_gpu else None

    def close(self) -> None:
        """Let go of the module and put torch's settings back."""
        self._opened.closing.close()
        self._run = None

    def _bound(self, inputs: Arrays) -> Callable[[], object]:
        import torch

        ready = self._opened
        fitted = fit_inputs(inputs, self.inputs)
        given = [torch.tensor(fitted[tensor.name]) for tensor in self.inputs]
        args, kwargs = ready.program.arguments(ready.put(given))

        def run() -> object:
            with torch.inference_mode():
                return ready.forward(*args, **kwargs)

        return run

    @contextmanager
    def _errors(self, inputs: Arrays) -> Iterator[None]:
        """A failure with other shapes than the example's is the inputs' fault, not the mode's."""
        try:
            with torch_errors(self._what):
                yield
        except BuildFailedError as error:
            program = self._opened.program
            own = {
                one.name: tuple(tensor.shape)
                for one, tensor in zip(program.inputs, program.tensors, strict=True)
            }
            if error.hint is not None or shapes_of(inputs) == own:
                raise
            shapes = ", ".join("x".join(map(str, shape)) for shape in own.values())
            raise BadInputError(error.message, hint=f"it runs with inputs of {shapes}") from error


def _settings(ready: Ready, engine: str, request: OpenRequest) -> VariantSettings:
    import torch

    platform: tuple[str, ...] = ()
    if ready.device.kind == CUDA:
        hip = torch.version.hip
        platform = (f"cuda={torch.version.cuda}",) if hip is None else (f"hip={hip}",)
    return VariantSettings(
        engine=engine,
        mode=request.mode,
        version=str(torch.__version__),
        device=ready.device.name,
        model=ready.program.source,
        weights=request.weights,
        precision=ready.precision,
        sparse_kernels=ready.sparse_kernels,
        threads=request.threads if ready.device.kind == CPU else None,
        timing=ready.device.timing,
        options=(*ready.options, *platform),
    )


def _module_times(
    module: nn.Module, device: TorchDevice, run: Callable[[], object], iterations: int
) -> tuple[LayerTime, ...]:
    """Mean time of each submodule without those inside it, in the order in which they end first.

    The times of all add up to the run; hooks make it slower.
    """
    # block(4 ms) around conv(1 ms) and relu(2 ms) gives the marks block, conv, None, relu, None,
    # None: conv 1 and relu 2 are added to inside_ms of block, which keeps 4 - 3 = 1 ms for itself
    marks: list[tuple[str | None, Untyped]] = []
    """Name at the start of a submodule, None at its end."""

    def take(name: str | None, *_: object) -> None:
        mark = device.mark()
        mark.record()
        marks.append((name, mark))

    with ExitStack() as stack:
        for name, part in module.named_modules():
            started, ended = partial(take, name or _ROOT), partial(take, None)
            stack.callback(part.register_forward_pre_hook(started).remove)
            stack.callback(part.register_forward_hook(ended).remove)
        for _ in range(iterations):
            run()
    total_ms: dict[str, float] = {}
    opened: list[tuple[str, Untyped]] = []
    inside_ms = [0.0]  # for each open submodule, and for the run around them
    for begun, mark in marks:
        if begun is not None:
            opened.append((begun, mark))
            inside_ms.append(0.0)
            continue
        layer, start = opened.pop()
        mark.synchronize()
        whole_ms = float(start.elapsed_time(mark))
        total_ms[layer] = total_ms.get(layer, 0.0) + whole_ms - inside_ms.pop()
        inside_ms[-1] += whole_ms
    return tuple(LayerTime(name=name, mean_ms=ms / iterations) for name, ms in total_ms.items())
