"""Damaged files: whatever bytes come in, the answer is a record or a TwofourError, and soon."""

from __future__ import annotations

import contextlib
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper
from support import onnx_models as om
from test_validate import linear, save_safetensors

from twofour.errors import TwofourError
from twofour.graph.opened import open_onnx
from twofour.pruning.onnx_file import prune_onnx
from twofour.pruning.verify import guess_weights, validate_onnx, validate_safetensors
from twofour.records.weights import Pattern
from twofour.store import to_json

TWO_FOUR = Pattern(2, 4)
Mutation = Callable[[bytes], bytes]


def _chain() -> bytes:
    nodes = [
        helper.make_node("QuantizeLinear", ["w", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("Reshape", ["d", "shape"], ["r"]),
        helper.make_node("Transpose", ["r"], ["v"], perm=[1, 0]),
    ]
    constants = {
        "w": om.weights(4, 4, 8),
        "s": np.array(0.1, np.float32),
        "z": np.array(0, np.int8),
        "shape": np.array([16, 8], np.int64),
    }
    content: bytes = om.before_matmul(nodes, constants, 8).SerializeToString()
    return content


def _external() -> bytes:
    model = om.two_weights()
    offset = 0
    for tensor in model.graph.initializer:
        size = len(tensor.raw_data)
        om.make_external(tensor, "w.bin", offset=offset)
        offset += size
    content: bytes = model.SerializeToString()
    return content


MODELS = [om.two_weights().SerializeToString(), _chain(), _external()]


@st.composite
def mutations(draw: st.DrawFn) -> Mutation:
    """Flip, overwrite, cut out, double or swap pieces, mostly near the small structural bytes."""
    steps = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["flip", "write", "cut", "double", "truncate", "insert"]),
                st.floats(0, 1, exclude_max=True),
                st.integers(1, 40),
                st.binary(min_size=1, max_size=10),
            ),
            min_size=1,
            max_size=4,
        )
    )

    def mutate(data: bytes) -> bytes:
        for kind, where, length, piece in steps:
            at = int(where * len(data))
            if kind == "flip":
                data = data[:at] + bytes(b ^ piece[0] for b in data[at : at + 1]) + data[at + 1 :]
            elif kind == "write":
                data = data[:at] + piece + data[at + len(piece) :]
            elif kind == "insert":
                data = data[:at] + piece + data[at:]
            elif kind == "cut":
                data = data[:at] + data[at + length :]
            elif kind == "double":
                data = data[:at] + data[at : at + length] * 2 + data[at + length :]
            else:
                data = data[:at]
        return data

    return mutate


def _bounded(work: Callable[[], object]) -> None:
    """Run it; only a TwofourError may come out, within seconds and without much memory."""
    start, before = time.monotonic(), _peak_bytes()
    with contextlib.suppress(TwofourError):
        work()
    assert time.monotonic() - start < 5
    assert _peak_bytes() - before < 64 << 20


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@settings(max_examples=250, deadline=None, derandomize=True)
@given(content=st.sampled_from(MODELS), mutate=mutations())
def test_a_mutated_onnx_file_gives_an_answer_or_a_clear_error(
    content: bytes, mutate: Mutation
) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "m.onnx"
        path.write_bytes(mutate(content))
        (path.parent / "w.bin").write_bytes(bytes(6000))
        _bounded(lambda: to_json(validate_onnx(open_onnx(path), TWO_FOUR)))
        _bounded(lambda: open_onnx(path).weights())
        before = sorted(p.name for p in path.parent.iterdir())
        done = False
        with contextlib.suppress(TwofourError):
            to_json(prune_onnx(open_onnx(path), path.parent / "out.onnx", TWO_FOUR))
            done = True
        if not done:
            assert sorted(p.name for p in path.parent.iterdir()) == before


@settings(max_examples=200, deadline=None, derandomize=True)
@given(mutate=mutations())
def test_small_structure_mutated_without_the_weights_in_between(mutate: Mutation) -> None:
    # an external model is nearly all structure, so each mutation hits a field, a name, a number
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "m.onnx"
        path.write_bytes(mutate(MODELS[2]))
        (path.parent / "w.bin").write_bytes(bytes(6000))
        _bounded(lambda: validate_onnx(open_onnx(path), TWO_FOUR))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(mutate=mutations())
def test_a_mutated_safetensors_file_gives_an_answer_or_a_clear_error(mutate: Mutation) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = save_safetensors(
            Path(name) / "m.safetensors",
            {"a.weight": om.weights(8, 8), "b.weight": om.weights(4, 4, dtype=om.BFLOAT16)},
        )
        path.write_bytes(mutate(path.read_bytes()))
        _bounded(lambda: to_json(validate_safetensors(path, guess_weights(path), TWO_FOUR)))
        named = [linear("a.weight", (8, 8)), linear("b.weight", (4, 4))]
        _bounded(lambda: validate_safetensors(path, named, TWO_FOUR))
