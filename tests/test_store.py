"""Records on disk: whole or not there, and read back as they were."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofour.errors import BadInputError
from twofour.records.run import RunManifest, StageRecord
from twofour.records.weights import Pattern, PruneResult, Selection
from twofour.store import (
    atomic_file,
    from_json,
    json_in_ascii,
    read_record,
    sha256_bytes,
    sha256_file,
    to_json,
    write_record,
)
from twofour.words import printable, printable_lines

MANIFEST = RunManifest(
    source="m.onnx",
    twofour_version="0.1.0",
    stages=(StageRecord(stage="prune", key="ab", outputs={"weights.safetensors": "cd"}),),
)


@pytest.mark.parametrize(
    "name", ["a\x1b[31m\x07\0", "\x9b31m\x7f\u202e\u2028", "\U000e0041", "é漢😀"]
)
def test_json_shows_no_terminal_anything_to_obey_and_keeps_the_name(name: str) -> None:
    text = to_json(replace(MANIFEST, source=name))
    assert text.replace("\n", "").isprintable()
    assert ("é漢😀" in text) == ("é" in name), "what can be read stays readable"
    assert json.loads(text)["source"] == name
    assert from_json(RunManifest, text).source == name
    assert json_in_ascii(text).isascii()
    assert json.loads(json_in_ascii(text)) == json.loads(text)


@given(st.text(st.characters(codec=None)))
def test_a_printable_text_holds_no_character_that_is_obeyed(text: str) -> None:
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)
    lines = printable_lines(text)
    assert lines.replace("\n", "").replace("\t", "").isprintable()
    assert lines.count("\n") == text.count("\n")
    assert printable_lines(text.replace("\n", "").replace("\t", "")) == printable(
        text.replace("\n", "").replace("\t", "")
    )


def test_a_pattern_is_checked_when_it_is_read_from_json() -> None:
    text = to_json(
        PruneResult(
            source="m", pattern=Pattern(2, 4), method="magnitude", selection=Selection(), weights=()
        )
    )
    with pytest.raises(BadInputError, match="4:4 is not an"):
        from_json(PruneResult, text.replace('"n": 2', '"n": 4'))


def test_json_of_another_shape_names_the_first_field_that_does_not_fit() -> None:
    with pytest.raises(BadInputError, match="source: Field required"):
        from_json(RunManifest, '{"twofour_version": "1", "stages": []}')


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    write_record(target, MANIFEST)
    before = target.read_text()

    def fail() -> None:
        with atomic_file(target) as temporary:
            temporary.write_text("half")
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        fail()
    assert target.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_a_record_of_a_later_version_is_refused(tmp_path: Path) -> None:
    write_record(tmp_path / "run.json", replace(MANIFEST, schema_version=2))
    with pytest.raises(BadInputError, match="RunManifest has version 2"):
        read_record(RunManifest, tmp_path / "run.json")


def test_a_missing_and_a_damaged_record_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"run\.json: No such"):
        read_record(RunManifest, tmp_path / "run.json")
    (tmp_path / "prune.json").write_text('{"pattern":')
    with pytest.raises(BadInputError, match=r"prune\.json: not a PruneResult") as caught:
        read_record(PruneResult, tmp_path / "prune.json")
    assert "writes it again" in (caught.value.hint or "")


def test_sha256_of_a_file_is_the_standard_one(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    assert sha256_file(tmp_path / "f").startswith("ba7816bf8f01cfea414140de5dae2223")


def test_parts_do_not_run_into_each_other_in_a_hash() -> None:
    assert sha256_bytes(b"ab", b"c") != sha256_bytes(b"a", b"bc")
