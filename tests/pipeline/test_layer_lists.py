"""Files that say which layers stay dense: written, read back, and refused with the line."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofour.errors import BadInputError
from twofour.pruning.selection import choose, glob_of, layer_list, read_layers
from twofour.records.weights import HARDWARE_PATTERN, Selection, Weight


def _read(tmp_path: Path, text: str | bytes, selection: Selection | None = None) -> Selection:
    file = tmp_path / "layers.txt"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_layers(file, selection or Selection())


def test_a_file_leaves_layers_dense_and_asks_for_others(tmp_path: Path) -> None:
    text = "# why\n\nstem.*   # too narrow\n+ grouped\nhead#1 # its name has a #\n"
    found = _read(tmp_path, text, Selection(exclude=("given",)))
    assert found.exclude == ("given", "stem.*", "head#1")
    assert found.include == ("grouped",)
    assert found.said_by == {
        "stem.*": f"{tmp_path / 'layers.txt'} line 3",
        "grouped": f"{tmp_path / 'layers.txt'} line 4",
        "head#1": f"{tmp_path / 'layers.txt'} line 5",
    }


@given(name=st.text(min_size=1, max_size=12))
def test_any_name_is_found_again_by_the_line_that_is_written_for_it(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    name = name.encode("utf-8", "replace").decode()
    folder = tmp_path_factory.mktemp("list")
    found = _read(folder, layer_list(["head"], [(glob_of(name), "costs 0.1 # of it")]))
    assert len(found.exclude) == 1
    assert found.include == ()
    assert fnmatchcase(name, found.exclude[0])


def test_a_name_with_the_characters_of_a_glob_matches_itself_alone() -> None:
    assert glob_of("blocks[0].*") == "blocks[[]0].[*]"
    assert not fnmatchcase("blocks0.x", glob_of("blocks[0].*"))


def test_a_file_of_comments_alone_leaves_the_selection_as_it_was(tmp_path: Path) -> None:
    given = Selection(exclude=("head",))
    assert _read(tmp_path, "# all of them", given) == given


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("a\n+\n", "line 2: + without a name"),
        ("a\n+a\n", "line 2: a is both to be pruned and to stay dense"),
        (b"\xff\xfea", "is no UTF-8 text"),
    ],
)
def test_what_is_no_list_is_refused(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(BadInputError, match=message.replace("+", r"\+")):
        _read(tmp_path, text)
    with pytest.raises(BadInputError, match="cannot read"):
        read_layers(tmp_path / "none.txt", Selection())


def test_a_line_that_matches_no_layer_is_named(tmp_path: Path) -> None:
    weight = Weight(
        layer="fc1", node=None, weight="fc1.weight", op="Linear", shape=(8, 8), axis=1, groups=1,
        in_channels=8, out_channels=8, kernel=(), dtype="float32", math_dtype="float32",
    )  # fmt: skip
    found = _read(tmp_path, "fc1\nfc2\n")
    with pytest.raises(BadInputError, match=r"layers\.txt line 2: fc2"):
        choose([weight], HARDWARE_PATTERN, found)
    ((_, pruned, reasons),) = choose([weight], HARDWARE_PATTERN, _read(tmp_path, "fc1\n"))
    assert not pruned
    assert reasons[0].message == f"left dense by {tmp_path / 'layers.txt'} line 1"
