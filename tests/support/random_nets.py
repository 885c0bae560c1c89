"""Nets of random operators, in which channels are mixed, moved, cut and joined in every way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from support.permuted_models import Net

Shape = tuple[int, ...]


class Builder:
    """One net: images and sequences of 4 or 8 channels, and what was made of them so far."""

    def __init__(self, seed: int) -> None:
        self.net = Net(seed=seed)
        self.random = np.random.default_rng(seed)
        self.images: list[tuple[str, int]] = []
        self.sequences: list[tuple[str, int]] = []

    def pick(self, pool: Sequence[tuple[str, int]]) -> tuple[str, int]:
        # mostly what was made last, so that nets are deep
        back = min(len(pool), 1 + int(self.random.geometric(0.4)))
        return pool[-back]

    def twin(self, pool: Sequence[tuple[str, int]], width: int) -> str:
        same = [name for name, channels in pool if channels == width]
        return same[int(self.random.integers(len(same)))]

    def image(self) -> None:
        name, width = self.pick(self.images)
        steps = list(IMAGE_STEPS)
        made = steps[int(self.random.integers(len(steps)))](self, name, width)
        if made is not None:
            self.images.append(made)

    def sequence(self) -> None:
        name, width = self.pick(self.sequences)
        steps = list(SEQUENCE_STEPS)
        made = steps[int(self.random.integers(len(steps)))](self, name, width)
        if made is not None:
            self.sequences.append(made)

    def even(self) -> int:
        return int(self.random.choice([4, 8, 16]))


Step = Callable[[Builder, str, int], "tuple[str, int] | None"]


def _conv(b: Builder, x: str, width: int) -> tuple[str, int]:
    out = b.even()
    groups = int(b.random.choice([g for g in (1, 1, 2, 4) if width % g == 0]))
    return b.net.conv(x, width, out, groups=groups, bias=bool(b.random.integers(2))), out


def _depthwise(b: Builder, x: str, width: int) -> tuple[str, int]:
    times = int(b.random.choice([1, 1, 2])) if width < 16 else 1
    return b.net.conv(x, width, width * times, groups=width), width * times


def _conv_transpose(b: Builder, x: str, width: int) -> tuple[str, int]:
    groups = int(b.random.choice([1, 2 if width % 2 == 0 else 1, width]))
    each = max(int(b.random.choice([1, 4])) if groups * 4 <= 16 else 1, 4 // groups)
    weight = b.net.constant(width, each, 1, 1)
    made = b.net.add("ConvTranspose", x, weight, b.net.constant(groups * each), group=groups)
    return made, groups * each


def _unary(b: Builder, x: str, width: int) -> tuple[str, int]:
    op = str(b.random.choice(["Relu", "Sigmoid", "Tanh", "Identity", "Neg", "HardSwish"]))
    return b.net.add(op, x), width


def _slope(b: Builder, x: str, width: int) -> tuple[str, int]:
    return b.net.add("PRelu", x, b.net.constant(width, 1, 1)), width


def _norm(b: Builder, x: str, width: int) -> tuple[str, int]:
    names = [b.net.constant(width) for _ in range(3)]
    variance = b.net.constant(values=np.linspace(1, 2, width).astype(np.float32))
    return b.net.add("BatchNormalization", x, *names, variance), width


def _instance_norm(b: Builder, x: str, width: int) -> tuple[str, int]:
    made = b.net.add("InstanceNormalization", x, b.net.constant(width), b.net.constant(width))
    return made, width


def _group_norm(b: Builder, x: str, width: int) -> tuple[str, int] | None:
    if width % 2:
        return None
    groups = int(b.random.choice([g for g in (1, 2, 4) if width % g == 0]))
    folded = b.net.add("Reshape", x, b.net.numbers(0, groups, -1))
    one, zero = (b.net.constant(values=np.full(groups, value, np.float32)) for value in (1.0, 0.0))
    normal = b.net.add("InstanceNormalization", folded, one, zero)
    back = b.net.add("Reshape", normal, b.net.numbers(0, width, 4, 4))
    return b.net.add("Mul", back, b.net.constant(width, 1, 1)), width


def _group_norm_op(b: Builder, x: str, width: int) -> tuple[str, int] | None:
    if width % 2:
        return None
    names = [b.net.constant(width), b.net.constant(width)]
    return b.net.add("GroupNormalization", x, *names, num_groups=2), width


def _add(b: Builder, x: str, width: int) -> tuple[str, int]:
    return b.net.add("Add", x, b.twin(b.images, width)), width


def _shift(b: Builder, x: str, width: int) -> tuple[str, int]:
    shape = [(1,), (width, 1, 1), (1, width, 1, 1), (4,), (width, 4, 1), ()]
    op = str(b.random.choice(["Add", "Mul", "Sub", "Max"]))
    constant = b.net.constant(*shape[int(b.random.integers(len(shape)))])
    pair = (x, constant) if b.random.integers(2) else (constant, x)
    return b.net.add(op, *pair), width


def _concat(b: Builder, x: str, width: int) -> tuple[str, int] | None:
    other, more = b.pick(b.images)
    if width + more > 16:
        return None
    return b.net.add("Concat", x, other, axis=int(b.random.choice([1, -3]))), width + more


def _split(b: Builder, x: str, width: int) -> tuple[str, int]:
    parts = b.net.add("Split", x, b.net.numbers(width // 2, width // 2), outputs=2, axis=1)
    b.images += [(part, width // 2) for part in parts]
    back = parts if b.random.integers(2) else parts[::-1]
    return b.net.add("Concat", *back, axis=1), width


def _slice(b: Builder, x: str, width: int) -> tuple[str, int]:
    step = int(b.random.choice([1, 2, -1]))
    start, end = (0, 2**31) if step > 0 else (-1, -(2**31))
    names = [b.net.numbers(n) for n in (start, end, 1, step)]
    return b.net.add("Slice", x, *names), -(-width // abs(step))


def _take(b: Builder, x: str, width: int) -> tuple[str, int]:
    picked = b.random.integers(0, width, width)
    return b.net.add("Gather", x, b.net.numbers(*map(int, picked)), axis=1), width


def _shuffle(b: Builder, x: str, width: int) -> tuple[str, int] | None:
    if width % 2:
        return None
    wide = b.net.add("Reshape", x, b.net.numbers(0, 2, width // 2, 4, 4))
    turned = b.net.add("Transpose", wide, perm=[0, 2, 1, 3, 4])
    return b.net.add("Reshape", turned, b.net.numbers(0, width, 4, 4)), width


def _softmax(b: Builder, x: str, width: int) -> tuple[str, int]:
    return b.net.add("Softmax", x, axis=int(b.random.choice([1, 2, -1]))), width


def _lrn(b: Builder, x: str, width: int) -> tuple[str, int]:
    return b.net.add("LRN", x, size=3, alpha=0.5), width


def _gate(b: Builder, x: str, width: int) -> tuple[str, int]:
    pooled = b.net.add("GlobalAveragePool", x)
    inner = b.net.add("Relu", b.net.conv(pooled, width, 8))
    gate = b.net.add("Sigmoid", b.net.conv(inner, 8, width))
    return b.net.add("Mul", x, gate), width


def _pool(b: Builder, x: str, width: int) -> tuple[str, int]:
    pads = [1, 1, 1, 1]
    return b.net.add("MaxPool", x, kernel_shape=[3, 3], pads=pads), width


def _mean(b: Builder, x: str, width: int) -> tuple[str, int]:
    mean = b.net.add("ReduceMean", x, b.net.numbers(-3), keepdims=1)
    return b.net.add("Sub", x, mean), width


def _uneven_split(b: Builder, x: str, width: int) -> tuple[str, int]:
    one, two = b.net.add("Split", x, b.net.numbers(1, width - 1), outputs=2, axis=1)
    b.images.append((two, width - 1))
    return b.net.add("Concat", two, b.net.add("Neg", one), axis=1), width


def _same_weight(b: Builder, x: str, width: int) -> tuple[str, int]:
    """One weight for two layers, the second reads what the first gives."""
    names = [b.net.scaled(width, width, width, 1, 1), b.net.constant(width)]
    once = b.net.add("Relu", b.net.add("Conv", x, *names))
    return b.net.add("Conv", once, names[0]), width


def _resize(b: Builder, x: str, width: int) -> tuple[str, int]:
    """Of places, of channels whose number stays, or of both."""
    along, mode = ((1.0, "linear"), (1.0, "nearest"), (1.0 + 0.9 / width, "nearest"))[
        int(b.random.integers(3))
    ]
    scales = b.net.constant(values=np.array([1, along, 2, 1], np.float32))
    larger = b.net.add("Resize", x, "", scales, mode=mode)
    halved = b.net.add("AveragePool", larger, kernel_shape=[2, 1], strides=[2, 1])
    return halved, width


def _pad(b: Builder, x: str, width: int) -> tuple[str, int]:
    start, end = ((0, 1), (1, -1), (0, 0))[int(b.random.integers(3))]
    places = b.net.add("Pad", x, b.net.numbers(0, start, 0, 1, 0, end, 0, -1), mode="constant")
    return places, width + start + end


def _where(b: Builder, x: str, width: int) -> tuple[str, int]:
    shape = [(width, 1, 1), (1, 4, 4), (width, 4, 4)][int(b.random.integers(3))]
    name = b.net.constant(values=b.random.integers(0, 2, shape).astype(bool))
    return b.net.add("Where", name, x, b.net.constant(width, 1, 1)), width


def _sorted(b: Builder, x: str, width: int) -> tuple[str, int]:
    axis = int(b.random.choice([1, 2, -1]))
    size = width if axis == 1 else 4
    values, _ = b.net.add("TopK", x, b.net.numbers(size), outputs=2, axis=axis)
    return values, width


def _unit(b: Builder, x: str, width: int) -> tuple[str, int]:
    return b.net.add("LpNormalization", x, axis=int(b.random.choice([1, -1])), p=2), width


def _squashed(b: Builder, x: str, width: int) -> tuple[str, int]:
    """Pooled with the axes taken away, and put back by a Gemm that gives scales."""
    op = str(b.random.choice(["ReduceMean", "ReduceMax", "ReduceL2"]))
    flat = b.net.add(op, x, b.net.numbers(-2, -1), keepdims=0)
    row = b.net.scaled(width, width, width)
    turned = int(b.random.integers(2))
    scales = b.net.add("Gemm", flat, row, b.net.constant(1, width), transB=turned)
    return b.net.add("Mul", x, b.net.add("Unsqueeze", scales, b.net.numbers(2, 3))), width


def _quantized_conv(b: Builder, x: str, width: int) -> tuple[str, int]:
    """Weights with a scale for each output, or each input; activations with a scale for each."""
    out, axis = b.even(), int(b.random.integers(2))
    stored = b.random.integers(-100, 100, (out, width, 1, 1)).astype(np.int8)
    scales = b.random.uniform(0.005, 0.02, (out, width)[axis]).astype(np.float32)
    weight = b.net.add(
        "DequantizeLinear", *(b.net.constant(values=v) for v in (stored, scales)), axis=axis
    )
    if b.random.integers(2):
        steps = [b.net.constant(values=np.full(width, 0.5, np.float32))]
        steps.append(b.net.constant(values=b.random.integers(-9, 9, width).astype(np.int8)))
        coarse = b.net.add("QuantizeLinear", b.net.add("Sign", x), *steps, axis=1)
        x = b.net.add("DequantizeLinear", coarse, *steps, axis=1)
    return b.net.add("Conv", x, weight), out


def _running_sum(b: Builder, x: str, width: int) -> tuple[str, int]:
    """An operator that nothing is known of."""
    return b.net.add("CumSum", x, b.net.numbers(int(b.random.choice([1, 2])))), width


def _repeated(b: Builder, x: str, width: int) -> tuple[str, int] | None:
    if width > 8:
        return None
    if b.random.integers(2):  # c0 c1 c0 c1
        return b.net.add("Tile", x, b.net.numbers(1, 2, 1, 1)), 2 * width
    wide = b.net.add(
        "Expand", b.net.add("Unsqueeze", x, b.net.numbers(2)), b.net.numbers(2, width, 2, 4, 4)
    )
    return b.net.add("Reshape", wide, b.net.numbers(0, -1, 4, 4)), 2 * width


def _to_sequence(b: Builder, x: str, width: int) -> None:
    if b.random.integers(2):
        flat = b.net.add("Reshape", x, b.net.numbers(0, width, 16))
        b.sequences.append((b.net.add("Transpose", flat, perm=[0, 2, 1]), width))
    else:  # channels and places in one axis
        flat = b.net.add("Flatten", x)
        lines = b.net.add("Unsqueeze", b.net.linear(flat, width * 16, 16), b.net.numbers(1))
        b.sequences.append((b.net.add("Expand", lines, b.net.numbers(2, 16, 16)), 16))


def _linear(b: Builder, x: str, width: int) -> tuple[str, int]:
    out = b.even()
    return b.net.linear(x, width, out), out


def _einsum(b: Builder, x: str, width: int) -> tuple[str, int]:
    out = b.even()
    return b.net.add("Einsum", x, b.net.constant(out, width), equation="bsc,oc->bso"), out


def _layer_norm(b: Builder, x: str, width: int) -> tuple[str, int]:
    names = [b.net.constant(width), b.net.constant(width)]
    return b.net.add("LayerNormalization", x, *names, axis=-1), width


def _plain_norm(b: Builder, x: str, width: int) -> tuple[str, int]:
    centred = b.net.add("Sub", x, b.net.add("ReduceMean", x, b.net.numbers(-1)))
    square = b.net.add("Mul", centred, centred)
    spread = b.net.add("Sqrt", b.net.add("ReduceMean", square, b.net.numbers(2)))
    shifted = b.net.add("Add", spread, b.net.constant(values=np.array(0.1, np.float32)))
    return b.net.add("Mul", b.net.add("Div", centred, shifted), b.net.constant(width)), width


def _add_sequence(b: Builder, x: str, width: int) -> tuple[str, int]:
    return b.net.add("Add", x, b.twin(b.sequences, width)), width


def _positions(b: Builder, x: str, width: int) -> tuple[str, int]:
    return b.net.add("Add", x, b.net.constant(16, width)), width


def _attention(b: Builder, x: str, width: int) -> tuple[str, int]:
    net, heads = b.net, 2
    shared = bool(b.random.integers(2))  # key and value of one head for all queries

    def split(made: str, count: int) -> str:
        lines = net.add("Reshape", made, net.numbers(0, 0, count, -1))
        turned: str = net.add("Transpose", lines, perm=[0, 2, 1, 3])
        return turned

    query = split(net.linear(x, width, 8 * heads), heads)
    key, value = (
        split(net.linear(x, width, 8 if shared else 16), 1 if shared else 2) for _ in "kv"
    )
    if shared and b.random.integers(2):
        value = net.add("Expand", value, net.numbers(2, heads, 16, 8))
    scores = net.add("MatMul", query, net.add("Transpose", key, perm=[0, 1, 3, 2]))
    mixed = net.add("MatMul", net.add("Softmax", scores, axis=-1), value)
    joined = net.add(
        "Reshape", net.add("Transpose", mixed, perm=[0, 2, 1, 3]), net.numbers(0, 0, 16)
    )
    return net.linear(joined, 16, width), width


def _token_mixing(b: Builder, x: str, width: int) -> tuple[str, int]:
    turned = b.net.add("Transpose", x, perm=[0, 2, 1])
    inner = b.net.add("Relu", b.net.linear(turned, 16, 8))
    back = b.net.linear(inner, 8, 16)
    return b.net.add("Transpose", back, perm=[0, 2, 1]), width


def _quantized(b: Builder, x: str, width: int) -> tuple[str, int]:
    out = b.even()
    random = b.random
    stored = random.integers(-100, 100, (width, out)).astype(np.int8)
    scales = random.uniform(0.005, 0.02, out).astype(np.float32)
    names = [b.net.constant(values=v) for v in (stored, scales, np.zeros(out, np.int8))]
    weight = b.net.add("DequantizeLinear", *names, axis=1)
    return b.net.add("MatMul", x, weight), out


IMAGE_STEPS: tuple[Step, ...] = (
    *(_conv, _conv, _depthwise, _conv_transpose, _unary, _slope, _norm, _instance_norm),
    *(_group_norm, _group_norm_op, _add, _add, _shift, _concat, _split, _slice, _take, _shuffle),
    *(_softmax, _lrn, _gate, _pool, _mean, _to_sequence, _uneven_split, _same_weight, _resize),
    *(_pad, _where, _sorted, _unit, _squashed, _quantized_conv, _running_sum, _repeated),
)
SEQUENCE_STEPS: tuple[Step, ...] = (
    *(_linear, _linear, _einsum, _layer_norm, _plain_norm, _add_sequence, _positions, _attention),
    *(_token_mixing, _quantized, _unary),
)


def random_net(seed: int) -> tuple[Net, list[str], Mapping[str, Sequence[int | str]]]:
    """A net, its outputs and its inputs."""
    b = Builder(seed)
    b.images.append((b.net.conv("x", 8, b.even()), 0))
    b.images[0] = (b.images[0][0], b.net.constants["c0"].shape[0])
    for _ in range(int(b.random.integers(2, 9))):
        b.image()
    outputs = []
    if not b.sequences and b.random.integers(2):
        _to_sequence(b, *b.images[-1])
    if b.sequences:
        for _ in range(int(b.random.integers(1, 7))):
            b.sequence()
        outputs.append(b.net.linear(b.sequences[-1][0], b.sequences[-1][1], 5))
    outputs.append(b.net.conv(b.images[-1][0], b.images[-1][1], 5))
    return b.net, outputs, {"x": [2, 8, 4, 4]}
