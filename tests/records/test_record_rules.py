"""The records' own rules."""

from typing import get_type_hints

import pytest

from twofour.errors import BadInputError
from twofour.records.export import EngineFiles, OnnxFile, TrtexecVariant, VariantBuild
from twofour.records.options import Variant
from twofour.records.run import VariantCheck
from twofour.records.weights import Pattern
from twofour.store import checked


def test_a_pattern_is_read_from_text() -> None:
    assert Pattern.parse(" 2:4 ") == Pattern(2, 4)
    assert str(Pattern(4, 16)) == "4:16"


@pytest.mark.parametrize("text", ["", "2", "2/4", "a:b", "2:4:8", "-2:4", "9999:4"])
def test_other_text_is_no_pattern(text: str) -> None:
    with pytest.raises(BadInputError, match="not an N:M pattern"):
        Pattern.parse(text)


@pytest.mark.parametrize(("n", "m"), [(0, 4), (4, 4), (5, 4), (2, 33)])
def test_n_must_be_positive_and_below_m_and_m_at_most_32(n: int, m: int) -> None:
    with pytest.raises(BadInputError, match=f"{n}:{m}"):
        Pattern(n, m)


def test_a_variant_is_a_choice_that_reads_as_its_word() -> None:
    for kind in (OnnxFile, VariantCheck, EngineFiles, VariantBuild, TrtexecVariant):
        assert get_type_hints(kind)["variant"] is Variant
    assert f"{Variant.DENSE}.onnx" == "dense.onnx"
    assert str(Variant.SPARSE) == "sparse"
    with pytest.raises(BadInputError, match=r"OnnxFile.variant: .*'dense', 'sparse'"):
        checked(OnnxFile, OnnxFile(variant="thin", file="thin.onnx", size_bytes=1))  # type: ignore[arg-type]  # what is refused
