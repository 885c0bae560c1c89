from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofour.errors import BadInputError
from twofour.inputs.examples import beyond_ranges, bind_shapes, parse_shapes, profiles_for
from twofour.inputs.fits import Arrays, at_shapes, fit_inputs, numpy_type, shapes_of
from twofour.records.export import TensorShape
from twofour.records.options import ShapeProfile, SizeRange

IMAGE = TensorShape(name="x", dtype="float32", shape=("batch", 3, 224, 224))
DIMS = st.integers(1, 2**31 - 1)


@st.composite
def profiles(draw: st.DrawFn) -> ShapeProfile:
    name = draw(st.from_regex(r"[A-Za-z_./:][\w./:=\[\]]{0,12}", fullmatch=True))
    rows = draw(st.lists(st.tuples(DIMS, DIMS, DIMS).map(sorted), min_size=1, max_size=5))
    smallest, usual, largest = zip(*rows, strict=True)
    return ShapeProfile(input=name, min=smallest, opt=usual, max=largest)


@given(st.lists(profiles(), max_size=4, unique_by=lambda p: p.input), st.booleans())
def test_every_profile_that_is_written_out_is_read_back(
    wanted: list[ShapeProfile], joined: bool
) -> None:
    texts = []
    for profile in wanted:
        shapes = ("x".join(map(str, shape)) for shape in (profile.min, profile.opt, profile.max))
        texts.append(f"{profile.input}={':'.join(shapes)}")
    assert parse_shapes([",".join(texts)] if joined and texts else texts) == tuple(wanted)


def test_one_shape_alone_is_min_opt_and_max() -> None:
    (profile,) = parse_shapes(["input:0=8x3x224x224"])
    shape = (8, 3, 224, 224)
    assert profile == ShapeProfile(input="input:0", min=shape, opt=shape, max=shape)
    assert parse_shapes(["'x'=1x2"])[0].input == "x", "trtexec writes such quotes"


@given(st.text(max_size=30) | st.from_regex(r"x=[\dx:,=]{1,20}", fullmatch=True))
def test_any_other_text_is_bad_input_or_a_profile_in_order(text: str) -> None:
    try:
        found = parse_shapes([text])
    except BadInputError:
        return
    assert found
    assert all(a <= b <= c for p in found for a, b, c in zip(p.min, p.opt, p.max, strict=True))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x", "cannot read 'x'"),
        ("=1x2", "cannot read '=1x2'"),
        ("x=1x2:2x2", "cannot read"),
        ("x=1xtwo", "cannot read"),
        ("x=0x2", "not in 1.."),
        ("x=1x2,x=1x2", "names input 'x' twice"),
        ("x=1x2:1x2x3:1x2x3", "different ranks"),
        ("x=4x3:2x3:8x3", "without min <= opt <= max"),
    ],
)
def test_a_mistake_is_named(text: str, words: str) -> None:
    with pytest.raises(BadInputError) as failure:
        parse_shapes([text])
    assert words in failure.value.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("image=1x3x224x224", "no input 'image'"),
        ("x=1x3x224", "cannot be 1x3x224"),
        ("x=1x3x224x224:1x3x224x224:1x3x448x224", "cannot be 1x3x448x224"),
    ],
)
def test_shapes_that_contradict_the_model_are_bad_input(text: str, words: str) -> None:
    with pytest.raises(BadInputError) as failure:
        bind_shapes(parse_shapes([text]), (IMAGE,))
    assert words in str(failure.value)
    assert "batch x 3 x 224 x 224" in str(failure.value)


def test_a_batch_goes_from_one_to_eight_or_the_example_and_other_dimensions_stay() -> None:
    tokens = TensorShape(name="ids", dtype="int64", shape=("batch", "sequence"))
    fixed = TensorShape(name="scale", dtype="float32", shape=(1,))
    examples: Arrays = {"ids": np.zeros((4, 77), np.int64), "scale": np.zeros(1, np.float32)}
    found = profiles_for((), (tokens, fixed), shapes_of(examples))
    assert found == (ShapeProfile(input="ids", min=(1, 77), opt=(4, 77), max=(8, 77)),)
    (larger,) = profiles_for((), (tokens,), {"ids": (20, 77)})
    assert larger.max == (20, 77)


def test_a_dynamic_input_without_example_asks_for_shapes() -> None:
    with pytest.raises(BadInputError, match="dynamic shape and no example") as failure:
        profiles_for((), (IMAGE,), {})
    assert "--shapes x=min:opt:max" in (failure.value.hint or "")


def tokens(*names: str) -> tuple[TensorShape, ...]:
    return tuple(TensorShape(name=n, dtype="int64", shape=("batch", "sequence")) for n in names)


def test_a_profile_of_one_input_holds_for_all_whose_dimensions_have_its_names() -> None:
    inputs = tokens("input_ids", "attention_mask", "token_type_ids")
    found = bind_shapes(parse_shapes(["input_ids=1x8:8x128:16x512"]), inputs)
    assert [p.input for p in found] == ["input_ids", "attention_mask", "token_type_ids"]
    assert {(p.min, p.opt, p.max) for p in found} == {((1, 8), (8, 128), (16, 512))}


def test_two_ranges_for_one_name_are_an_error_that_names_both() -> None:
    asked = parse_shapes(["ids=1x8:8x128:16x512", "mask=1x8:8x64:16x512"])
    with pytest.raises(BadInputError) as failure:
        bind_shapes(asked, tokens("ids", "mask"))
    assert failure.value.message == (
        "--shapes: 'sequence' is 128 in ids (dimension 1) and 64 in mask (dimension 1)"
    )


def test_dimensions_without_a_name_are_not_bound() -> None:
    free = [TensorShape(name=n, dtype="int64", shape=("?", "?")) for n in ("a", "b")]
    assert [p.input for p in bind_shapes(parse_shapes(["a=1x2"]), free)] == ["a"]
    found = profiles_for(parse_shapes(["a=1x2"]), free, {"a": (5, 6), "b": (3, 4)})
    assert [p.opt for p in found] == [(1, 2), (3, 4)]


def test_a_size_that_the_file_has_a_range_for_goes_over_it_up_to_the_cap() -> None:
    known = {"sequence": SizeRange(name="sequence", min=1, max=4096)}
    ids, mask = profiles_for((), tokens("ids", "mask"), {"ids": (2, 27), "mask": (2, 27)}, known)
    assert (ids.min, ids.opt, ids.max) == ((1, 1), (2, 27), (8, 512))
    assert (mask.min, mask.opt, mask.max) == (ids.min, ids.opt, ids.max)
    long = profiles_for((), tokens("ids"), {"ids": (2, 2000)}, known)
    assert long[0].max == (8, 4000)
    endless = {"sequence": SizeRange(name="sequence", min=1, max=None)}
    assert profiles_for((), tokens("ids"), {"ids": (2, 27)}, endless)[0].max == (8, 512)


def test_shapes_beyond_the_range_that_the_file_says_are_told() -> None:
    known = {"sequence": SizeRange(name="sequence", min=1, max=64)}
    assert beyond_ranges(parse_shapes(["ids=1x1:1x16:4x64"]), tokens("ids"), known) == ()
    (note,) = beyond_ranges(parse_shapes(["ids=1x1:1x16:4x100"]), tokens("ids"), known)
    assert note.startswith("sequence goes from 1 to 100 in --shapes, and the file says 1 to 64:")


def wanted(dtype: str, shape: tuple[int | str, ...] = ("n", 4)) -> tuple[TensorShape, ...]:
    return (TensorShape(name="x", dtype=dtype, shape=shape),)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "float32"])
def test_floats_become_the_models_float_type(dtype: str) -> None:
    x = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
    fitted = fit_inputs({"x": x}, wanted(dtype))["x"]
    assert fitted.dtype == numpy_type(dtype)
    np.testing.assert_array_equal(fitted, x.astype(numpy_type(dtype)))


def test_an_array_is_copied_only_where_it_is_not_contiguous() -> None:
    same = np.zeros((2, 4), np.float32)
    assert fit_inputs({"x": same}, wanted("float32"))["x"] is same
    x = np.arange(8, dtype=np.float32).reshape(4, 2).T
    fitted = fit_inputs({"x": x}, wanted("float32"))["x"]
    assert fitted.flags.c_contiguous
    np.testing.assert_array_equal(fitted, x)


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_another_byte_order_becomes_that_of_the_machine(dtype: str) -> None:
    x = np.arange(8, dtype=np.dtype(dtype).newbyteorder(">")).reshape(2, 4)
    fitted = fit_inputs({"x": x}, wanted(dtype))["x"]
    assert fitted.dtype.isnative
    np.testing.assert_array_equal(fitted, x)


def test_integers_are_converted_where_every_value_fits() -> None:
    x = np.array([[0, 1, -5, 2**31 - 1]], np.int64)
    assert fit_inputs({"x": x}, wanted("int32"))["x"].dtype == np.int32


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.array([[0, 0, 0, 2**31]], np.int64), "int32"),
        (np.array([[-1, 0, 0, 0]], np.int64), "uint8"),
        (np.zeros((1, 4), np.float32), "int64"),
        (np.zeros((1, 4), np.int64), "float32"),
    ],
)
def test_a_conversion_that_would_change_values_is_bad_input(
    array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], dtype: str
) -> None:
    with pytest.raises(BadInputError, match=f"type {dtype} in the model, found {array.dtype}"):
        fit_inputs({"x": array}, wanted(dtype))


@pytest.mark.parametrize("shape", [(2, 5), (2, 4, 1), ()])
def test_another_rank_or_fixed_dimension_is_bad_input(shape: tuple[int, ...]) -> None:
    with pytest.raises(BadInputError, match=r"input x \(n x 4\) cannot be"):
        fit_inputs({"x": np.zeros(shape, np.float32)}, wanted("float32"))


@pytest.mark.parametrize("names", [(), ("y",), ("x", "y")])
def test_missing_and_unknown_names_are_bad_input(names: tuple[str, ...]) -> None:
    with pytest.raises(BadInputError, match=r"takes the inputs \['x'\]"):
        fit_inputs({name: np.zeros((1, 4), np.float32) for name in names}, wanted("float32"))


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=3).map(
        lambda pairs: tuple(zip(*pairs, strict=True))
    )
)
def test_inputs_are_cut_or_repeated_to_the_shape(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    before, after = shapes
    x = np.arange(np.prod(before)).reshape(before)
    found = at_shapes({"x": x}, {"x": after})["x"]
    assert found.shape == after
    for index in np.ndindex(*after):
        assert found[index] == x[tuple(i % n for i, n in zip(index, before, strict=True))]
