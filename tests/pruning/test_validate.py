"""Validation reads files back: rows, what fails, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper
from support import onnx_models as om
from support import report_cases

from twofour.errors import BadInputError
from twofour.export.casts import Kept, convert_onnx
from twofour.graph.opened import open_onnx
from twofour.pruning.onnx import prune_onnx
from twofour.pruning.verify import guess_weights, validate_onnx, validate_safetensors
from twofour.records.options import Precision
from twofour.records.weights import Pattern, ReasonCode, Selection, Weight

TWO_FOUR = Pattern(2, 4)
KINDS = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "int8": "I8",
    "int64": "I64",
}


def sparse(*shape: int, axis: int, dtype: Any = np.float32) -> om.Array:
    """2:4 along the axis: the last two of every four are zero."""
    values = om.weights(*shape, dtype=dtype)
    index = np.arange(shape[axis]).reshape([-1 if a == axis else 1 for a in range(len(shape))])
    return np.where(index % 4 < 2, values, np.zeros_like(values))


def save_safetensors(path: Path, arrays: dict[str, om.Array]) -> Path:
    """The format, written from its description."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for key, array in arrays.items():
        end = len(data) + array.nbytes
        kind = KINDS[array.dtype.name]
        header[key] = {"dtype": kind, "shape": array.shape, "data_offsets": [len(data), end]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def linear(key: str, shape: tuple[int, int]) -> Weight:
    return report_cases.linear(key.removesuffix(".weight"), shape[1], shape[0], weight=key)


# --- ONNX -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("external", [True, False])
def test_a_pruned_file_holds_and_a_dense_one_fails_with_the_first_violation(
    tmp_path: Path, external: bool
) -> None:
    save = om.save_external if external else om.save
    dense = save(om.two_weights(), tmp_path / "dense.onnx")
    prune_onnx(open_onnx(dense), tmp_path / "sparse.onnx", TWO_FOUR)
    good = validate_onnx(open_onnx(tmp_path / "sparse.onnx"), TWO_FOUR)
    assert [(c.layer, c.op, c.shape, c.axis, c.violations, c.required) for c in good.checks] == [
        ("conv", "Conv", (16, 8, 3, 3), 1, 0, True),
        ("fc", "Gemm", (64, 16), 1, 0, True),
    ]
    assert [c.groups_checked for c in good.checks] == [16 * 2 * 9, 64 * 4]
    assert (good.broken, good.files) == ((), (str(tmp_path / "sparse.onnx"),))
    bad = validate_onnx(open_onnx(dense), TWO_FOUR)
    assert [c.violations for c in bad.broken] == [16 * 2 * 9, 64 * 4]
    assert [c.first_violation for c in bad.broken] == [(0, 0, 0, 0), (0, 0)]


@pytest.mark.parametrize(
    ("model", "row"),
    [
        (om.conv(sparse(16, 32, 3, 3, axis=1)), (1, 0, None, None)),
        (om.conv(sparse(16, 32, 3, 3, axis=0)), (1, 576, (0, 0, 0, 0), 0)),
        (om.matmul(sparse(32, 16, axis=1)), (0, 64, (0, 0), 1)),
        (om.gemm(sparse(16, 32, axis=1, dtype=om.BFLOAT16), trans_b=1), (1, 0, None, None)),
        (
            om.quantized_conv(
                sparse(16, 32, 3, 3, axis=1, dtype=np.int8), zero_point=None, quantize_output=True
            ),
            (1, 0, None, None),
        ),
    ],
)
def test_the_row_says_whether_the_pattern_holds_or_along_which_axis_instead(
    tmp_path: Path, model: Any, row: tuple[int, int, tuple[int, ...] | None, int | None]
) -> None:
    (check,) = validate_onnx(open_onnx(om.save(model, tmp_path / "m.onnx")), TWO_FOUR).checks
    assert (check.axis, check.violations, check.first_violation, check.holds_along) == row


def test_a_single_wrong_weight_deep_inside_is_found(tmp_path: Path) -> None:
    values = sparse(64, 16, axis=0)
    values[22:24, 7] = 1.0
    path = om.save_external(om.matmul(values), tmp_path / "m.onnx", padding=1)
    (check,) = validate_onnx(open_onnx(path), TWO_FOUR).broken
    assert (check.violations, check.first_violation) == (1, (20, 7))


def test_a_tail_is_a_group_and_its_weight_is_not_required(tmp_path: Path) -> None:
    path = om.save(om.gemm(om.weights(16, 30), trans_b=1), tmp_path / "m.onnx")
    (check,) = validate_onnx(open_onnx(path), TWO_FOUR).checks
    assert (check.groups_checked, check.violations) == (16 * 8, 16 * 7)
    assert not check.required


def test_required_names_decide_what_fails(tmp_path: Path) -> None:
    source = om.save(om.two_weights(), tmp_path / "dense.onnx")
    target = tmp_path / "sparse.onnx"
    result = prune_onnx(open_onnx(source), target, TWO_FOUR, Selection(exclude=("fc",)))
    pruned = {row.weight.weight for row in result.weights if row.pruned and row.weight.weight}
    assert pruned == {"conv.weight"}
    assert validate_onnx(open_onnx(target), TWO_FOUR, required=pruned).broken == ()
    everything = validate_onnx(open_onnx(target), TWO_FOUR)
    assert [check.layer for check in everything.broken] == ["fc"]


@pytest.mark.parametrize("name", ["gone.weight", "fc.bias"])
def test_a_required_weight_that_cannot_be_judged_is_an_error(tmp_path: Path, name: str) -> None:
    path = om.save(om.two_weights(), tmp_path / "m.onnx")
    with pytest.raises(BadInputError, match=f"1 of 2 weights.*'{name}'"):
        validate_onnx(open_onnx(path), TWO_FOUR, required=["conv.weight", name])


def test_layers_without_a_constant_are_listed_with_their_reason(tmp_path: Path) -> None:
    model = om.two_weights()
    model.graph.node.append(helper.make_node("Conv", ["x", "x"], ["z"], name="dynamic"))
    validation = validate_onnx(open_onnx(om.save(model, tmp_path / "m.onnx")), TWO_FOUR)
    assert [weight.layer for weight in validation.skipped] == ["dynamic"]
    assert validation.skipped[0].reasons[0].code is ReasonCode.NOT_CONSTANT
    assert len(validation.checks) == 2


def test_a_model_without_weights_is_nothing_to_check(tmp_path: Path) -> None:
    model = om.model([helper.make_node("Relu", ["x"], ["y"])], {}, inputs={"x": [2]})
    with pytest.raises(BadInputError, match="nothing to check: it has no weight"):
        validate_onnx(open_onnx(om.save(model, tmp_path / "m.onnx")), TWO_FOUR)


def test_a_sparse_initializer_alone_is_named_as_what_cannot_be_checked(tmp_path: Path) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="fc")
    model = om.model([node], {}, inputs={"x": [2, 64]})
    values = helper.make_tensor("w", TensorProto.FLOAT, [1], [2.0])
    indices = helper.make_tensor("places", TensorProto.INT64, [1], [3])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [64, 8]))
    path = om.save(model, tmp_path / "m.onnx")
    with pytest.raises(BadInputError, match="fc: weight 'w' is a sparse initializer"):
        validate_onnx(open_onnx(path), TWO_FOUR)
    with pytest.raises(BadInputError) as failure:
        convert_onnx(open_onnx(path), tmp_path / "half.onnx", Precision.FLOAT16, Kept())
    assert "sparse initializer" in str(failure.value.hint)


# --- safetensors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, om.BFLOAT16, ml_dtypes.float8_e4m3fn, np.int8]
)
def test_every_type_is_judged_in_the_bytes_of_the_file(tmp_path: Path, dtype: Any) -> None:
    arrays = {
        "bias": om.weights(3),  # so that the weights do not begin at a multiple of their size
        "odd": om.weights(1, dtype=np.int8),
        "good.weight": sparse(32, 32, axis=1, dtype=dtype),
        "turned.weight": sparse(32, 32, axis=0, dtype=dtype),
    }
    path = save_safetensors(tmp_path / "m.safetensors", arrays)
    weights = [linear("good.weight", (32, 32)), linear("turned.weight", (32, 32))]
    good, turned = validate_safetensors(path, weights, TWO_FOUR).checks
    assert (good.violations, good.groups_checked, good.required) == (0, 256, True)
    assert (turned.violations, turned.first_violation, turned.holds_along) == (128, (0, 0), 0)


def test_a_weight_that_is_missing_or_of_another_shape_is_an_error(tmp_path: Path) -> None:
    path = save_safetensors(tmp_path / "m.safetensors", {"a": om.weights(8, 8)})
    with pytest.raises(BadInputError, match="has no weight 'b'"):
        validate_safetensors(path, [linear("b", (8, 8))], TWO_FOUR)
    with pytest.raises(BadInputError, match=r"\[8, 8\].*\[8, 4\]"):
        validate_safetensors(path, [linear("a", (8, 4))], TWO_FOUR)
    with pytest.raises(BadInputError, match="nothing to check"):
        validate_safetensors(path, [], TWO_FOUR)


def test_a_bare_checkpoint_is_guessed_at_and_says_so(tmp_path: Path) -> None:
    shapes = {
        "model.embed_tokens.weight": (50, 8),
        "encoder.word_embeddings.weight": (50, 8),
        "transformer.wte.weight": (50, 8),
        "layers.0.input_layernorm.weight": (8, 1),
        "layers.0.fc1.weight": (128, 8),
        "layers.0.fc1.bias": (16,),
        "attn.in_proj_weight": (192, 8),
        "stem.conv.weight": (32, 4, 3, 3),
        "stem.bn1.weight": (8,),
        "patch_embed.proj.weight": (64, 4, 2, 2),
        "lm_head.weight": (50, 32),
        "remember.weight": (8, 128),
    }
    arrays = {key: om.weights(*shape) for key, shape in shapes.items()}
    path = save_safetensors(tmp_path / "m.safetensors", arrays)
    guessed = guess_weights(path)
    assert [(w.layer, w.weight, w.op, w.axis) for w in guessed] == [
        ("layers.0.fc1", "layers.0.fc1.weight", "Linear?", 1),
        ("attn", "attn.in_proj_weight", "Linear?", 1),
        ("stem.conv", "stem.conv.weight", "Conv2d?", 1),
        ("patch_embed.proj", "patch_embed.proj.weight", "Conv2d?", 1),
        ("lm_head", "lm_head.weight", "Linear?", 1),
        ("remember", "remember.weight", "Linear?", 1),
    ]
    assert {w.reasons[0].code for w in guessed} == {ReasonCode.GUESSED}
    assert len(validate_safetensors(path, guessed, TWO_FOUR).broken) == 6


def test_a_missing_checkpoint_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(BadInputError, match="cannot read"):
            guess_weights(path)


def test_weights_of_a_type_without_single_elements_are_skipped(tmp_path: Path) -> None:
    text = json.dumps({"a.weight": {"dtype": "F4", "shape": [8, 8], "data_offsets": [0, 32]}})
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + bytes(32))
    (weight,) = guess_weights(path)
    assert (weight.axis, [r.code for r in weight.reasons]) == (
        None,
        [ReasonCode.GUESSED, ReasonCode.DTYPE],
    )
    with pytest.raises(BadInputError, match=r"expected .* float32"):
        validate_safetensors(path, [replace(linear("a.weight", (8, 8)))], TWO_FOUR)
