"""A TensorRT that records: autospecs of the real bindings, so a name that does not exist fails.

What it fakes is what the bindings reach only through libraries and a GPU: builder, network, parser,
runtime, engine and context. Enums, loggers, monitors, profilers and allocators are the real ones.
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import onnx
import polygraphy.cuda.cuda
import pytest
import tensorrt as trt

from twofour.engines.protocol import BuildRequest
from twofour.records.options import BuildOptions, Variant

CLASSES = dict(vars(trt))
"""Of the bindings as they were imported: tests replace some of them."""
PLAN = b"a serialized plan"
LAYERS = {"Layers": [{"Name": "fc", "TacticName": "sm80_xmma_sparse_gemm"}], "Bindings": ["x", "y"]}


def spec(name: str) -> Any:
    """An instance with exactly the attributes and signatures of that class of the bindings."""
    instance = create_autospec(CLASSES[name], spec_set=True, instance=True)
    if hasattr(CLASSES[name], "__enter__"):
        instance.__enter__.return_value = instance  # as those of 8.6 do
    return instance


class FakeBuild:
    """Everything `build` touches up to the serialized plan, with what was asked of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.flags: set[Any] = set()
        self.network_flags: int | None = None
        self.caches: list[bytes] = []
        self.shapes: dict[str, tuple[Any, ...]] = {}
        self.pools: dict[Any, int] = {}
        self.monitor_answers: list[Any] = []
        self.plan: bytes | None = PLAN
        self.messages: list[tuple[str, str]] = []
        self.logger: Any = None
        self.config = self._config()
        self.network = self._network()
        self.parser = spec("OnnxParser")
        self.parser.parse_from_file.return_value = True
        self.parser.num_errors = 0
        self.builder = self._builder()
        monkeypatch.setattr(trt, "Builder", self._create_builder)
        monkeypatch.setattr(trt, "OnnxParser", lambda *_: self.parser)
        monkeypatch.setattr(trt, "init_libnvinfer_plugins", lambda *_: True)
        self.run = FakeRun(monkeypatch)
        """What loads the plan that comes out."""

    def _create_builder(self, logger: Any) -> Any:
        self.logger = logger
        return self.builder

    def _builder(self) -> Any:
        builder = spec("Builder")
        builder.create_network.side_effect = self._create_network
        builder.create_builder_config.side_effect = self._create_config
        profile = spec("IOptimizationProfile")
        profile.set_shape.side_effect = lambda name, *shapes: self.shapes.update({name: shapes})
        builder.create_optimization_profile.return_value = profile
        builder.build_serialized_network.side_effect = self._build
        return builder

    def _create_network(self, flags: int = 0) -> Any:
        self.network_flags = flags
        return self.network

    def _create_config(self) -> Any:
        self.config.num_optimization_profiles = 0
        return self.config

    def _network(self) -> Any:
        tensor = spec("ITensor")
        tensor.name, tensor.shape, tensor.is_shape_tensor = "x", (-1, 16), False
        network = spec("INetworkDefinition")
        network.num_inputs, network.num_layers = 1, 0
        network.get_input.return_value = tensor
        network.__getitem__.side_effect = IndexError
        return network

    def _config(self) -> Any:
        config = spec("IBuilderConfig")
        config.set_flag.side_effect = self.flags.add
        config.clear_flag.side_effect = self.flags.discard
        config.get_flag.side_effect = self.flags.__contains__
        config.DLA_core, config.num_optimization_profiles = -1, 0
        if hasattr(trt.IBuilderConfig, "int8_calibrator"):
            config.int8_calibrator = None
        config.get_memory_pool_limit.return_value = 0
        config.get_tactic_sources.return_value = 0
        config.set_memory_pool_limit.side_effect = self.pools.__setitem__
        config.add_optimization_profile.side_effect = self._add_profile
        config.create_timing_cache.side_effect = self._create_cache
        cache = spec("ITimingCache")
        cache.serialize.return_value.__enter__ = lambda *_: b"timings"
        cache.serialize.return_value.__exit__ = lambda *_: None
        config.get_timing_cache.return_value = cache
        return config

    def _add_profile(self, _profile: Any) -> int:
        self.config.num_optimization_profiles += 1
        return 0

    def _create_cache(self, content: bytes) -> Any:
        self.caches.append(content)
        return spec("ITimingCache")

    def _build(self, network: Any, config: Any) -> bytes | None:
        assert network is self.network
        assert config is self.config
        for severity, text in self.messages:
            self.logger.log(getattr(trt.ILogger, severity), text)
        if not hasattr(trt, "IProgressMonitor"):
            return self.plan
        monitor: Any = config.progress_monitor
        assert isinstance(monitor, trt.IProgressMonitor)
        monitor.phase_start("Building Engine", None, 2)
        self.monitor_answers.append(monitor.step_complete("Building Engine", 0))
        self.monitor_answers.append(monitor.step_complete("Building Engine", 1))
        monitor.phase_finish("Building Engine")
        return self.plan


class HostCuda:
    """Polygraphy's CUDA wrapper over host memory, so that what is copied can be looked at."""

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}

    def create_stream(self) -> int:
        return 1

    def stream_synchronize(self, ptr: int) -> None:
        pass

    def destroy_stream(self, ptr: int) -> None:
        pass

    def malloc(self, nbytes: int) -> int:
        buffer = ctypes.create_string_buffer(max(nbytes, 1))
        self.memory[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def free(self, ptr: int) -> None:
        self.memory.pop(ptr, None)

    def memcpy(self, dst: int, src: int, nbytes: int, **_kind_and_stream: Any) -> None:
        ctypes.memmove(dst, src, nbytes)


class TimedCuda(HostCuda):
    """Polygraphy's wrapper with the library behind it, as the real one has."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self.handle = library


class FakeRun:
    """Runtime, engine and context of a plan that computes y = 2 x, in `dtype` (of the bindings)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dtype: Any = trt.float32) -> None:
        self.dtype = dtype
        self.shape: tuple[int, ...] = (-1, 16)
        self.address: dict[str, int] = {}
        self.allocator: Any = None
        """None: the output has a fixed address."""
        self.is_data_dependent = False
        """The size of the output is known once it has run."""
        self.gpu_ms = 1.5
        """Where a test has a clock, what a run takes of it."""
        self.runs = 0
        self.can_run = True
        self.context = self._context()
        self.inspector = spec("EngineInspector")
        self.inspector.get_engine_information.return_value = json.dumps(LAYERS)
        self.engine: Any = self._engine()
        self.cuda = HostCuda()
        self.runtime = spec("Runtime")
        self.runtime.deserialize_cuda_engine.side_effect = self._deserialize
        monkeypatch.setattr(trt, "Runtime", lambda *_: self.runtime)
        monkeypatch.setattr(polygraphy.cuda.cuda, "G_CUDA", self.cuda)

    def _deserialize(self, content: bytes) -> Any:
        return self.engine if content == PLAN else None

    def _engine(self) -> Any:
        engine = spec("ICudaEngine")
        engine.num_io_tensors = 2
        if hasattr(trt.ICudaEngine, "__len__"):  # 8.6: its bindings, and an empty one is false
            engine.__len__.return_value = 2
        engine.get_tensor_name.side_effect = ["x", "y"].__getitem__
        modes = {"x": trt.TensorIOMode.INPUT, "y": trt.TensorIOMode.OUTPUT}
        engine.get_tensor_mode.side_effect = modes.__getitem__
        engine.get_tensor_dtype.side_effect = lambda *_: self.dtype
        engine.get_tensor_shape.return_value = (-1, 16)
        engine.get_tensor_format.return_value = trt.TensorFormat.LINEAR
        engine.is_shape_inference_io.return_value = False
        if hasattr(trt.ICudaEngine, "get_aliased_input_tensor"):
            engine.get_aliased_input_tensor.return_value = None
        engine.create_execution_context.return_value = self.context
        engine.create_engine_inspector.return_value = self.inspector
        return engine

    def _context(self) -> Any:
        context = spec("IExecutionContext")
        context.get_tensor_shape.side_effect = self._shape_of
        context.set_input_shape.side_effect = self._set_shape
        context.get_tensor_address.side_effect = lambda name: self.address.get(name, 0)
        context.set_tensor_address.side_effect = self._set_address
        context.set_output_allocator.side_effect = self._set_allocator
        context.execute_async_v3.side_effect = self._execute
        context.profiler = None
        return context

    def _shape_of(self, name: str) -> tuple[int, ...]:
        if name == "y" and self.is_data_dependent:
            return (-1, *self.shape[1:])
        return self.shape

    def _set_shape(self, _name: str, shape: tuple[int, ...]) -> bool:
        self.shape = tuple(shape)
        return True

    def _set_address(self, name: str, address: int) -> bool:
        self.address[name] = address
        return True

    def _set_allocator(self, _name: str, allocator: Any) -> bool:
        self.allocator = allocator
        return True

    def _execute(self, _stream: int) -> bool:
        if not self.can_run:
            return False
        self.runs += 1
        size = int(np.prod(self.shape)) * self.dtype.itemsize
        target = self.address.get("y", 0)
        if self.allocator is not None:
            target = self.allocator.reallocate_output("y", target, size, 256)
            self.allocator.notify_shape("y", self.shape)
        raw = ctypes.string_at(self.address["x"], size)
        ctypes.memmove(target, self._twice(raw), size)
        if self.context.profiler is not None:
            self.context.profiler.report_layer_time("fc", 0.5)
            self.context.profiler.report_layer_time("act", 0.25)
        return True

    def _twice(self, raw: bytes) -> bytes:
        if self.dtype == trt.float32:
            return bytes((np.frombuffer(raw, np.float32) * 2).tobytes())
        # bfloat16: one more in the exponent, which has 7 bits of fraction below it
        return bytes((np.frombuffer(raw, np.uint16) + np.uint16(1 << 7)).tobytes())


def onnx_file(folder: Path) -> Path:
    """A model without nodes: what a network of it has, only the fake parser says."""
    path = folder / "sparse.onnx"
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [])), path)
    return path


def request_for(folder: Path, *, sparse: bool = True, **options: Any) -> BuildRequest:
    return BuildRequest(
        variant=Variant.SPARSE if sparse else Variant.DENSE,
        onnx=onnx_file(folder),
        folder=folder,
        sparse_weights=sparse,
        options=BuildOptions(**options),
        inputs={"x": np.ones((8, 16), np.float32)},
        timing_cache=folder / "timing.cache",
    )
