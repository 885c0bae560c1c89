from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofour.engines.protocol import Arrays
from twofour.engines.shapes import check_shapes, parse_shapes, profiles_for
from twofour.errors import BadInputError
from twofour.records import ShapeProfile, TensorShape

IMAGE = TensorShape(name="x", dtype="float32", shape=("batch", 3, 224, 224))
DIMS = st.integers(1, 2**31 - 1)


@st.composite
def profiles(draw: st.DrawFn) -> ShapeProfile:
    name = draw(st.from_regex(r"[A-Za-z_./:][\w./:=\[\]]{0,12}", fullmatch=True))
    rows = draw(st.lists(st.tuples(DIMS, DIMS, DIMS).map(sorted), min_size=1, max_size=5))
    smallest, usual, largest = zip(*rows, strict=True)
    return ShapeProfile(input=name, min=smallest, opt=usual, max=largest)


def text_of(profile: ShapeProfile) -> str:
    shapes = ("x".join(map(str, shape)) for shape in (profile.min, profile.opt, profile.max))
    return f"{profile.input}={':'.join(shapes)}"


@given(st.lists(profiles(), max_size=4, unique_by=lambda p: p.input), st.booleans())
def test_every_profile_that_is_written_out_is_read_back(
    wanted: list[ShapeProfile], joined: bool
) -> None:
    texts = [text_of(profile) for profile in wanted]
    assert parse_shapes([",".join(texts)] if joined and texts else texts) == tuple(wanted)


def test_one_shape_alone_is_min_opt_and_max() -> None:
    (profile,) = parse_shapes(["input:0=8x3x224x224"])
    shape = (8, 3, 224, 224)
    assert profile == ShapeProfile(input="input:0", min=shape, opt=shape, max=shape)


def test_quotes_around_a_name_are_those_of_trtexec() -> None:
    assert parse_shapes(["'x'=1x2"])[0].input == "x"


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
        ("x=-1x2", "cannot read"),
        ("x=0x2", "not in 1.."),
        ("x=1x2,x=1x2", "names input 'x' twice"),
        ("x=1x2:1x2x3:1x2x3", "different ranks"),
        ("x=4x3:2x3:8x3", "dimension 0 of 'x' has min 4, opt 2, max 8"),
        ("x=1x9:1x9:1x8", "dimension 1 of 'x' has min 9, opt 9, max 8"),
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
        ("x=1x3x224", "given 3 dimensions"),
        ("x=1x4x224x224", "dimension 1 of 'x' is fixed to 3, found 4:4:4"),
        ("x=1x3x224x224:1x3x224x224:1x3x448x224", "dimension 2 of 'x' is fixed to 224"),
    ],
)
def test_shapes_that_contradict_the_model_are_bad_input(text: str, words: str) -> None:
    with pytest.raises(BadInputError) as failure:
        check_shapes(parse_shapes([text]), (IMAGE,))
    assert words in str(failure.value)
    assert "batch x 3 x 224 x 224" in str(failure.value)


def test_a_batch_goes_from_one_to_the_example_and_other_dimensions_stay() -> None:
    tokens = TensorShape(name="ids", dtype="int64", shape=("batch", "sequence"))
    fixed = TensorShape(name="scale", dtype="float32", shape=(1,))
    examples: Arrays = {"ids": np.zeros((4, 77), np.int64), "scale": np.zeros(1, np.float32)}
    found = profiles_for((), (tokens, fixed), examples)
    assert found == (ShapeProfile(input="ids", min=(1, 77), opt=(4, 77), max=(4, 77)),)


def test_a_fixed_batch_is_never_widened() -> None:
    tensor = TensorShape(name="x", dtype="float32", shape=(2, "width"))
    (profile,) = profiles_for((), (tensor,), {"x": np.zeros((2, 5), np.float32)})
    assert (profile.min, profile.max) == ((2, 5), (2, 5))


def test_what_is_asked_for_goes_before_the_example() -> None:
    asked = parse_shapes(["x=1x3x224x224:2x3x224x224:4x3x224x224"])
    assert profiles_for(asked, (IMAGE,), {"x": np.zeros((8, 3, 224, 224), np.float32)}) == asked


def test_a_dynamic_input_without_example_asks_for_shapes() -> None:
    with pytest.raises(BadInputError, match="dynamic shape and no example") as failure:
        profiles_for((), (IMAGE,), {})
    assert "--shapes x=min:opt:max" in (failure.value.hint or "")
