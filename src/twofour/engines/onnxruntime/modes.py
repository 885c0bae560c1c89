"""ONNX Runtime's modes in a comparison: what each asks of a session, and which can run here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from twofour.engines.onnxruntime.providers import TENSORRT, ProviderSetup, open_on
from twofour.engines.onnxruntime.session import CPU, CUDA, HINT, PROBE, SessionSetup
from twofour.engines.protocol import Mode, ModeStatus
from twofour.errors import BadInputError, MissingToolError, first_line
from twofour.records.options import ShapeProfile

ENGINE = "onnxruntime"
MODES = (
    Mode(name="cpu", widens_half=True),
    Mode(name="cuda"),
    Mode(name="tensorrt", sparse_kernels=False),
    Mode(name="tensorrt-sparse", sparse_kernels=True, needs_sparse=True),
    Mode(name="int8", activations="int8"),
    Mode(name="uint8", activations="uint8"),
)
NAMES = tuple(mode.name for mode in MODES)
# Threads that wait for work by spinning take the cores from the variants that run next; this stops
# them at the end of a run and keeps what spinning gains within it (benchmarks/LOG.md).
QUIET_AFTER_RUN = {"session.force_spinning_stop": "1"}
_ASSIGNMENT = {"session.record_ep_graph_assignment_info": "1"}
_PRECISION_FLAGS = {
    "float16": "trt_fp16_enable",
    "bfloat16": "trt_bf16_enable",
    "int8": "trt_int8_enable",
}


def provider_setup(mode: str, precision: str, shapes: tuple[ShapeProfile, ...]) -> ProviderSetup:
    """What a mode asks of ONNX Runtime; raises BadInputError for a mode that is not in `NAMES`.

    `precision` names the types of the file's graph, joined with "+": the TensorRT provider builds a
    weakly typed network, which needs a flag for each narrow one.
    """
    if mode not in NAMES:
        raise BadInputError(
            f"onnxruntime has no mode {mode!r}", hint=f"choose one of {', '.join(NAMES)}"
        )
    if mode in {"cpu", "int8", "uint8"}:
        return ProviderSetup(providers=((CPU, {}),), config=QUIET_AFTER_RUN)
    config = {**QUIET_AFTER_RUN, **_ASSIGNMENT}
    if mode == "cuda":
        return ProviderSetup(providers=((CUDA, {}), (CPU, {})), config=config)
    flags = {"trt_sparsity_enable": "1" if mode == "tensorrt-sparse" else "0"}
    narrow = (_PRECISION_FLAGS.get(word) for word in precision.split("+"))
    flags |= dict.fromkeys(filter(None, narrow), "1") | _profile_flags(shapes)
    return ProviderSetup(providers=((TENSORRT, flags), (CUDA, {}), (CPU, {})), config=config)


def onnxruntime_statuses(modes: Sequence[str] = NAMES) -> tuple[ModeStatus, ...]:
    """Whether these modes can run here, established by a session in each; never raises."""
    return tuple(_status(mode) for mode in modes)


def _profile_flags(shapes: tuple[ShapeProfile, ...]) -> dict[str, str]:
    def words(which: str) -> str:
        rows = [(shape.input, getattr(shape, which)) for shape in shapes]
        return ",".join(f"{name}:{'x'.join(map(str, dims))}" for name, dims in rows)

    return {f"trt_profile_{w}_shapes": words(w) for w in ("min", "opt", "max")} if shapes else {}


def _probe(mode: str) -> None:
    session = open_on(provider_setup(mode, "float32", ()), PROBE, SessionSetup(threads=1))
    session.run(None, {"x": np.ones(1, np.float32)})


def _status(mode: str) -> ModeStatus:
    try:
        _probe(mode)
    except MissingToolError as error:
        return ModeStatus(engine=ENGINE, mode=mode, why_not=error.message, hint=error.hint)
    except ImportError as error:
        why = f"onnxruntime cannot be imported: {first_line(error)}"
        return ModeStatus(engine=ENGINE, mode=mode, why_not=why, hint=HINT)
    except Exception as error:  # noqa: BLE001  # a status says whatever keeps it from running
        return ModeStatus(engine=ENGINE, mode=mode, why_not=first_line(error), hint=HINT)
    return ModeStatus(engine=ENGINE, mode=mode, why_not=None)
