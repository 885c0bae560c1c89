"""Hostile inputs by the thousand: valid files changed with their structure in mind.

`pytest tests/test_fuzz_*.py` tries a few of every kind; `make fuzz SECONDS=600` goes on with
new ones for as long as asked and keeps every file that was not answered by a record or a clear
error under build/fuzz.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import shutil
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]  # no stubs
from google.protobuf.message import Message  # type: ignore[import-untyped]  # no stubs here
from onnx import TensorProto, helper

from support import onnx_models as om
from twofour.errors import BadInputError, TwofourError

Mutate = Callable[[random.Random, bytes], bytes]

_NUMBERS = (
    0, 1, -1, 2, 7, 127, 2**31 - 1, 2**31, -(2**31), 2**32, 2**40, 2**62, 2**63 - 1, -(2**63),
)  # fmt: skip
_TEXTS = (
    "", "x", "w", "y", "../../etc/passwd", "/dev/zero", "n" * 300, "n" * 20_000, "a/" * 3_000,
    "a\0b", "\x1b[31m", "<script>", "1" * 400, "nan", "f", "A", "MatMul", "Conv", "If", "axis",
    "\u202e\u0663", "C:\\x", "ai.onnx", "{ForeignNode[a...b]}",
)  # fmt: skip
_PIECES = (
    b"\xff" * 9 + b"\x01", b"\x00" * 8, b"\xed\xa0\x80", b"9" * 400, b"[" * 3_000, b"\xff\xfe",
    b"PK\x03\x04", b"1e999", b"-", b"NaN", b"\n", b"\r", b"(Sparsity)", b"[V] ", b'"', b"}",
)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 10**30, 1e308, 0.5, "", "x", "n" * 20_000, "nan", [], {}, [[]],
    {"": None}, ["a", 1], "../../x", 2**64,
)  # fmt: skip


def mutate_bytes(rng: random.Random, content: bytes) -> bytes:
    """One to four pieces flipped, cut, doubled, moved, or replaced by what parsers stumble over."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        length = rng.choice((1, 1, 2, 8, 40, 400))
        step = rng.randrange(6)
        if step == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif step == 1:
            del data[at : at + length]
        elif step == 2:
            data[at:at] = data[at : at + length] * rng.choice((1, 2, 30))
        elif step == 3:
            data[at:at] = rng.choice(_PIECES)
        elif step == 4:
            piece = rng.choice(_PIECES)
            data[at : at + len(piece)] = piece
        else:
            del data[at:]
    return bytes(data)


def mutate_json(rng: random.Random, content: bytes) -> bytes:
    """Values of a document replaced, removed, doubled, or nested deeply."""
    document = json.loads(content)
    for _ in range(rng.randint(1, 3)):
        document = _changed(rng, document)
    deep = rng.random() < 0.02
    text = json.dumps(document)
    return (f'{{"a":{"[" * 2000}{text}{"]" * 2000}}}' if deep else text).encode()


def _changed(rng: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        return _changed_dict(rng, value)
    if isinstance(value, list) and value and rng.random() < 0.9:
        return _changed_list(rng, value)
    return rng.choice(_VALUES)


def _changed_dict(rng: random.Random, value: dict[str, Any]) -> dict[str, Any]:
    key = rng.choice(sorted(value))
    step = rng.randrange(8)
    if step == 0:
        return {k: v for k, v in value.items() if k != key}
    if step == 1:
        return {**value, rng.choice(("x", "n" * 5_000)): value[key]}
    return {**value, key: _changed(rng, value[key])}


def _changed_list(rng: random.Random, value: list[Any]) -> list[Any]:
    at = rng.randrange(len(value))
    step = rng.randrange(6)
    if step == 0:
        return value[:at] + value[at + 1 :]
    if step == 1:
        return value[:at] + value[at : at + 1] * rng.choice((2, 300)) + value[at:]
    return [*value[:at], _changed(rng, value[at]), *value[at + 1 :]]


def mutate_onnx(rng: random.Random, content: bytes) -> bytes:
    """Fields of the model set to extremes, messages doubled, removed or swapped; then bytes."""
    model = onnx.ModelProto()
    model.ParseFromString(content)
    for _ in range(rng.randint(1, 4)):
        _change_field(rng, _some_message(rng, model))
    data: bytes = model.SerializeToString()
    return mutate_bytes(rng, data) if rng.random() < 0.15 else data


def _some_message(rng: random.Random, message: Message) -> Message:
    """A random walk downwards; it ends anywhere."""
    while rng.random() < 0.85:
        inner: list[Message] = []
        for field, value in message.ListFields():
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                inner += list(value) if _repeated(field, value) else [value]
        if not inner:
            break
        message = rng.choice(inner)
    return message


def _repeated(field: FieldDescriptor, value: object) -> bool:
    return field.type == FieldDescriptor.TYPE_MESSAGE and not isinstance(value, Message)


def _change_field(rng: random.Random, message: Message) -> None:
    field = rng.choice(list(message.DESCRIPTOR.fields))
    value = getattr(message, field.name)
    single = isinstance(value, (int, float, str, bytes, Message))
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        _change_messages(rng, message, field.name, single=single)
    elif single:
        setattr(message, field.name, _scalar(rng, field))
    elif len(value) and rng.random() < 0.7:
        value[rng.randrange(len(value))] = _scalar(rng, field)
    else:
        value.extend([_scalar(rng, field)] * rng.choice((1, 1, 40)))


def _change_messages(rng: random.Random, message: Message, name: str, *, single: bool) -> None:
    value = getattr(message, name)
    if single:
        message.ClearField(name)
    elif not len(value):
        value.add()
    elif rng.random() < 0.4:
        del value[rng.randrange(len(value))]
    else:
        for _ in range(rng.choice((1, 1, 30))):
            value.add().CopyFrom(rng.choice(list(value)))


def mutate_graph(rng: random.Random, content: bytes) -> bytes:
    """A model whose messages are whole and whose graph is not: wrong order, names, shapes, ops."""
    model = onnx.ModelProto()
    model.ParseFromString(content)
    steps = (
        _swap_nodes, _drop_node, _double_node, _rewire, _lie_of_shape, _other_op,
        _drop_attribute, _nest, _huge_constant, _own_domain,
    )  # fmt: skip
    for _ in range(rng.randint(1, 4)):
        rng.choice(steps)(rng, rng.choice(_graphs(model)))
    found: bytes = model.SerializeToString()
    return found


def _graphs(model: onnx.ModelProto) -> list[onnx.GraphProto]:
    found = [model.graph]
    for graph in found:
        found += [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    return [graph for graph in found if graph.node] or [model.graph]


def _swap_nodes(rng: random.Random, graph: onnx.GraphProto) -> None:
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in graph.node]
    rng.shuffle(nodes)
    del graph.node[:]
    graph.node.extend(nodes)


def _drop_node(rng: random.Random, graph: onnx.GraphProto) -> None:
    if graph.node:
        del graph.node[rng.randrange(len(graph.node))]


def _double_node(rng: random.Random, graph: onnx.GraphProto) -> None:
    if graph.node:
        graph.node.add().CopyFrom(rng.choice(list(graph.node)))


def _rewire(rng: random.Random, graph: onnx.GraphProto) -> None:
    """An input or output gets another tensor's name, one that nobody makes, or none."""
    names = [name for node in graph.node for name in (*node.input, *node.output)]
    names += [tensor.name for tensor in graph.initializer] + ["", "nobody", "n" * 300]
    node = rng.choice(list(graph.node) or [onnx.NodeProto(input=["x"])])
    ends = rng.choice((node.input, node.output))
    if ends and rng.random() < 0.8:
        ends[rng.randrange(len(ends))] = rng.choice(names)
    else:
        ends.extend([rng.choice(names)] * rng.choice((1, 3, 200)))


def _lie_of_shape(rng: random.Random, graph: onnx.GraphProto) -> None:
    """Dimensions and type of a constant, whose bytes stay."""
    for tensor in rng.sample(list(graph.initializer), min(1, len(graph.initializer))):
        dims = rng.choice(((), (0, 4), (2**31, 2**31), (2**62, 2), (1,) * 40, (-1, 3), (256,)))
        if rng.random() < 0.5:
            del tensor.dims[:]
            tensor.dims.extend(dims)
        else:
            tensor.data_type = rng.choice((0, 1, 2, 3, 7, 8, 9, 10, 14, 16, 17, 22, 23, 99))


def _other_op(rng: random.Random, graph: onnx.GraphProto) -> None:
    ops = (
        "Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum", "Loop", "Scan", "If", "Expand", "Tile",
        "Split", "Slice", "Gather", "Reshape", "Transpose", "Squeeze", "Concat", "Pad", "Resize",
        "ConstantOfShape", "Range", "LayerNormalization", "BatchNormalization", "LSTM", "Attention",
        "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "Constant", "NonZero",
    )  # fmt: skip
    if graph.node:
        rng.choice(list(graph.node)).op_type = rng.choice(ops)


def _drop_attribute(rng: random.Random, graph: onnx.GraphProto) -> None:
    node = rng.choice(list(graph.node) or [onnx.NodeProto()])
    if node.attribute:
        del node.attribute[rng.randrange(len(node.attribute))]


def _nest(rng: random.Random, graph: onnx.GraphProto) -> None:
    """The graph in a branch of its own, again and again."""
    inner = onnx.GraphProto.FromString(graph.SerializeToString())
    for _ in range(rng.choice((1, 5, 12))):
        node = helper.make_node("If", ["c"], ["h"], "if", then_branch=inner, else_branch=inner)
        inner = helper.make_graph([node], "branch", [], [])
        if inner.ByteSize() > 1 << 14:
            break
    graph.node.extend(inner.node)


def _huge_constant(rng: random.Random, graph: onnx.GraphProto) -> None:
    """A few bytes that stand for terabytes, before a product."""
    size = np.array([16, rng.choice((10**12, 2**62, 0, -1))], np.int64)
    graph.initializer.append(om.tensor("huge.size", size))
    op = rng.choice(("ConstantOfShape", "Expand", "Tile"))
    given = ["huge.size"] if op == "ConstantOfShape" else ["w", "huge.size"]
    graph.node.insert(0, helper.make_node(op, given, ["huge"]))
    graph.node.append(helper.make_node("MatMul", ["x", "huge"], ["huge.out"]))


def _own_domain(rng: random.Random, graph: onnx.GraphProto) -> None:
    if graph.node:
        rng.choice(list(graph.node)).domain = rng.choice(("f", "com.microsoft", "ai.onnx.ml", "?"))


def _scalar(rng: random.Random, field: FieldDescriptor) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(_TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.choice((*_PIECES, b""))
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return rng.choice((0.0, -1.0, float("inf"), float("nan"), 1e30))
    if field.type == FieldDescriptor.TYPE_ENUM:
        return rng.choice([value.number for value in field.enum_type.values])
    narrow = field.type in (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_UINT64)
    return rng.choice([n for n in _NUMBERS if not narrow or 0 <= n < 2**31])


def mutate_npz(rng: random.Random, content: bytes) -> bytes:
    """A member replaced, renamed, doubled or packed; headers of arrays changed as text."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    at = rng.randrange(len(members))
    name, data = members[at]
    step = rng.randrange(5)
    if step == 0:
        members[at] = (name, mutate_bytes(rng, data))
    elif step == 1:
        members[at] = (rng.choice(_TEXTS) or "x", data)
    elif step == 2:
        members.append(
            (rng.choice(("x.npy", "readme.txt", "y")), rng.choice((b"", b"hello", data)))
        )
    elif step == 3:
        shape = str(rng.choice(((2**40, 2**40), (-1,), (10**12,), (1,) * 80, ())))
        members[at] = (name, data.replace(b"(2, 8)", shape.encode()))
    else:
        return mutate_bytes(rng, content)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", rng.choice((0, 8))) as archive:
        for member, data in members:
            archive.writestr(member, data)
    return packed.getvalue()


def models() -> list[bytes]:
    """Weights in every kind of place: initializers, functions, branches, behind Q/DQ, Reshape."""
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("f", 1)]
    call = helper.make_node("B", ["a"], ["b"], domain="f")
    with_functions = om.two_weights()
    with_functions.functions.extend(
        [
            helper.make_function("f", "A", ["a"], ["b"], [call], opsets),
            helper.make_function(
                "f", "B", ["a"], ["b"], [helper.make_node("Relu", ["a"], ["b"])], opsets
            ),
        ]
    )
    with_functions.graph.node.add().CopyFrom(helper.make_node("A", ["x"], ["z"], domain="f"))
    branch = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["r"], "inner")],
        "branch",
        [],
        [helper.make_tensor_value_info("r", TensorProto.FLOAT, [2, 16])],
    )
    nodes = [
        helper.make_node("If", ["c"], ["h"], "if", then_branch=branch, else_branch=branch),
        helper.make_node("QuantizeLinear", ["w", "s", "q"], ["v"]),
        helper.make_node("DequantizeLinear", ["v", "s", "q"], ["d"]),
        helper.make_node("Reshape", ["d", "shape"], ["e"]),
        helper.make_node("Gemm", ["h", "e"], ["g"], "gemm", transB=1),
        helper.make_node("Conv", ["i", "k"], ["o"], "conv", group=2),
        helper.make_node("Einsum", ["g", "w"], ["y"], "einsum", equation="ab,bc->ac"),
    ]
    constants = {
        "w": om.weights(16, 16),
        "s": np.array(0.1, np.float32),
        "q": np.array(0, np.int8),
        "shape": np.array([16, 16], np.int64),
        "k": om.weights(8, 4, 3, 3),
    }
    inputs = {"x": [2, 16], "c": [1], "i": [1, 8, 9, 9]}
    mixed = om.model(nodes, constants, inputs=inputs)
    external = om.two_weights()
    for tensor in external.graph.initializer:
        om.make_external(tensor, "w.bin")
    found = (with_functions, mixed, external)
    return [model.SerializeToString() for model in found]


SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
"""How long `make fuzz` goes on with every kind; 0: a bounded sample, the same each time."""
SAMPLE = 25
_LONGEST_S = 10.0
"""Of this process's own time: other programs may be at work."""
_MOST_BYTES = 512 << 20
_ADDRESSES = 6 << 30
"""More than this process has already may not be asked for: a bomb ends in a MemoryError."""
_KEPT = Path("build/fuzz")


@dataclass(frozen=True)
class Kind:
    """One kind of file: valid examples, how to change them, and everything that reads them."""

    suffix: str
    seeds: tuple[bytes, ...]
    mutate: Mutate
    read: Callable[[Path], object]
    sample: int = SAMPLE


def read_all(readers: Sequence[Callable[[], object]], path: Path) -> None:
    """Each may refuse, and must name the file then."""
    for read in readers:
        try:
            read()
        except TwofourError as error:
            if isinstance(error, BadInputError) and path.name not in str(error):
                raise AssertionError(f"the file is not named: {error}") from error


def try_kind(name: str, kind: Kind, folder: Path) -> None:
    """A sample of one kind of file, or as many as the time allows."""

    def once(rng: random.Random) -> Path:
        path = folder / f"m{kind.suffix}"
        path.write_bytes(kind.mutate(rng, rng.choice(kind.seeds)))
        return path

    try_many(name, once, kind.read, sample=kind.sample)


def try_many(
    name: str,
    once: Callable[[random.Random], Path],
    read: Callable[[Path], object],
    sample: int = SAMPLE,
) -> None:
    """A sample, or as many as the time allows; what fails is kept and told of at the end."""
    first = time.time_ns() if SECONDS else 0
    ends = time.monotonic() + SECONDS
    failures: dict[str, str] = {}
    number = 0
    while time.monotonic() < ends if SECONDS else number < sample:
        path = once(random.Random(first + number))
        number += 1
        problem = _problem(read, path)
        if problem is not None and problem not in failures:
            failures[problem] = _keep(path, f"{name}-{first + number}")
    told = "\n".join(f"{problem}: {kept}" for problem, kept in failures.items())
    assert not failures, f"{len(failures)} kinds of failure in {number} {name} files:\n{told}"


def _problem(read: Callable[[Path], object], path: Path) -> str | None:
    """What is wrong with how the file was read: where in our code, for telling kinds apart."""
    started, before = time.process_time(), _peak_bytes()
    try:
        with _bounded_memory():
            read(path)
    except TwofourError as error:
        if path.name not in str(error):
            return f"the file is not named: {str(error)[:80]}"
    except Exception as error:  # noqa: BLE001  # the point of this test
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames if "twofour" in f.filename] or frames
        return f"{type(error).__name__} in {ours[-1].filename}:{ours[-1].lineno} {str(error)[:80]}"
    took, grown = time.process_time() - started, _peak_bytes() - before
    if took > _LONGEST_S:
        return f"over {_LONGEST_S} s"
    return f"over {_MOST_BYTES} bytes" if grown > _MOST_BYTES else None


def _keep(path: Path, name: str) -> str:
    _KEPT.mkdir(parents=True, exist_ok=True)
    target = _KEPT / f"{name}{path.suffix}"
    if path.is_dir():
        shutil.copytree(path, target, dirs_exist_ok=True)
    else:
        shutil.copyfile(path, target)
    return str(target)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextlib.contextmanager
def _bounded_memory() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _ADDRESSES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
