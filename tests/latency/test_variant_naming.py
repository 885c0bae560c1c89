from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofour.errors import BadInputError
from twofour.latency.naming import (
    VariantName,
    parse_variant_name,
    variant_name,
    without_batch,
)

WORDS = st.from_regex(r"[a-z0-9][a-z0-9_.+-]{0,12}", fullmatch=True)
LABELS = st.one_of(
    st.text(max_size=20),
    st.text(alphabet="@:/ b8again", max_size=20),
    st.sampled_from(["a@b:c", "a@b:c again", "a@b:c again:b8", "größe 2:4/x", "", "x\ny@z:w"]),
)


@pytest.mark.parametrize(
    ("again", "batch", "name"),
    [
        (False, None, "dense@onnxruntime:cpu"),
        (True, None, "dense@onnxruntime:cpu again"),
        (False, 8, "dense@onnxruntime:cpu:b8"),
        (True, 32, "dense@onnxruntime:cpu again:b32"),
    ],
)
def test_a_name_has_the_twin_before_the_batch(again: bool, batch: int | None, name: str) -> None:
    assert variant_name("dense", "onnxruntime", "cpu", again=again, batch=batch) == name


@given(LABELS, WORDS, WORDS, st.booleans(), st.none() | st.integers(1, 10**6))
def test_every_name_can_be_read_back(
    weights: str, engine: str, mode: str, again: bool, batch: int | None
) -> None:
    name = variant_name(weights, engine, mode, again=again, batch=batch)
    assert parse_variant_name(name) == VariantName(
        weights=weights, engine=engine, mode=mode, again=again, batch=batch
    )
    assert without_batch(name) == variant_name(weights, engine, mode, again=again)


@pytest.mark.parametrize("name", ["", "dense", "dense@cpu", "onnxruntime:cpu", "a@b:c:d", "a@:c"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(BadInputError, match="not the name of a variant"):
        parse_variant_name(name)
