"""torch as an engine: which modes can run here, and a module timed in one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from twofour.engines.protocol import Mode, OpenRequest, TimedModel
from twofour.engines.tensorrt.plan import MODES as TENSORRT_MODES
from twofour.engines.torch.modes import CPU, CUDA, MODES, Ready, torch_errors
from twofour.errors import TwofourError, first_line
from twofour.inputs.fits import Array, Arrays, fit_inputs, float32_array
from twofour.records.export import EngineStatus, LayerTime
from twofour.records.latency import VariantSettings


class TorchEngine:
    """Opens torch modules; there is nothing that it could build from ONNX."""

    name = "torch"
    modes = tuple(
        Mode(name=name, needs_sparse=name.startswith("semi-structured")) for name in MODES
    )
    open_levels: tuple[str, ...] = ()

    def status(self, mode: str | None = None) -> EngineStatus:
        """Whether there is torch, and what a mode needs, a GPU or a compiler; `open` tries it."""
        try:
            import torch
        except (ImportError, OSError, RuntimeError) as error:
            why_not = f"torch cannot be imported: {first_line(error)}"
            return _cannot_run(self.name, why_not, "pip install torch")
        wanted = mode or "eager"
        try:
            with torch_errors(f"{self.name}:{wanted} does not run"):
                device = MODES[wanted].device()
        except TwofourError as error:
            return _cannot_run(self.name, error.message, error.hint)
        return EngineStatus(
            engine=self.name,
            version=str(torch.__version__),
            can_run=True,
            why_not=None,
            device=device.name,
        )

    def open(self, request: OpenRequest) -> TimedModel:
        """A module in a mode, run once on its example inputs; one at a time in a process.

        The module is changed in place, and settings of torch (threads, attention back ends) are
        those of the process until `close`. Raises what `Engine.open` raises.
        """
        import torch

        program = request.program
        with ExitStack() as stack:
            with torch_errors(f"{self.name}:{request.mode} cannot run {program.source}"):
                torch.set_num_threads(request.threads)
                ready = MODES[request.mode].make(program, stack)
                ready.device.time_ms(ready.run_example)
            settings = _settings(ready, self.name, request)
            return TimedTorch(replace(ready, closing=stack.pop_all()), settings)


class TorchTensorRtEngine(TorchEngine):
    """A row that says what is missing: torch-tensorrt needs a GPU to be written for."""

    name = "torch-tensorrt"
    modes = TENSORRT_MODES

    def status(self, mode: str | None = None) -> EngineStatus:  # noqa: ARG002  # it has no mode yet
        """It cannot run."""
        why_not = "twofour does not run torch-tensorrt: there was no GPU to try it on"
        return _cannot_run(self.name, why_not, "export the model and build it with TensorRT")


def _cannot_run(engine: str, why_not: str, hint: str | None) -> EngineStatus:
    return EngineStatus(engine=engine, version=None, can_run=False, why_not=why_not, hint=hint)


class TimedTorch:
    """Meets TimedModel; made by `TorchEngine.open`."""

    size_bytes: int | None = None

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
        with torch_errors(self._what):
            self._run = self._bound(inputs)
            device.time_ms(self._run)  # waits, so that a GPU's errors show up here

    def run_ms(self) -> float:
        """One call of forward; what it spans is in `settings.timing`."""
        assert self._run is not None, "prepare comes first"
        with torch_errors(self._what):
            return self._opened.device.time_ms(self._run)

    def outputs(self, inputs: Arrays) -> dict[str, Array]:
        """Every tensor that forward returns, floats as float32."""
        program = self._opened.program
        with torch_errors(self._what):
            tensors = program.outputs(self._bound(inputs)())
            arrays = map(float32_array, tensors)
            return dict(zip(program.output_names, arrays, strict=True))

    def layer_times(self, iterations: int) -> tuple[LayerTime, ...]:  # noqa: ARG002  # the Protocol's
        """None: torch has no profile by layer that costs no time."""
        return ()

    def peak_device_memory_bytes(self) -> int | None:
        """Most memory in tensors since `prepare`, as torch's allocator counts it."""
        import torch

        if self._opened.device.kind != CUDA:
            return None
        return int(torch.cuda.max_memory_allocated())

    def close(self) -> None:
        """Let go of the module and put torch's settings back."""
        self._opened.closing.close()
        self._run = None

    def _bound(self, inputs: Arrays) -> Callable[[], object]:
        import torch

        ready = self._opened
        fitted = fit_inputs(inputs, self.inputs)
        tensors = [ready.put(torch.tensor(fitted[tensor.name])) for tensor in self.inputs]
        args, kwargs = ready.program.arguments(tensors)

        def run() -> object:
            with torch.inference_mode():
                return ready.forward(*args, **kwargs)

        return run


def _settings(ready: Ready, engine: str, request: OpenRequest) -> VariantSettings:
    import torch

    device = ready.device
    options = ready.options
    if device.kind == CUDA:
        hip = torch.version.hip  # None in builds for CUDA
        options += (f"cuda={torch.version.cuda}" if hip is None else f"hip={hip}",)
    return VariantSettings(
        engine=engine,
        mode=request.mode,
        version=str(torch.__version__),
        device=device.name,
        model=ready.program.source,
        weights=request.weights,
        precision=ready.precision,
        sparse_kernels=ready.sparse_kernels,
        threads=request.threads if device.kind == CPU else None,
        timing=device.timing,
        options=options,
    )
