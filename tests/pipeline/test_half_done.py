"""Work that is half done is gone on with only where it is as it was left, to the last bit."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from twofour.errors import BadInputError
from twofour.pipeline.calibration_folder import Finished, finished, write_array, write_finished
from twofour.pruning.onnx_file import Solution
from twofour.pruning.solve import Solved
from twofour.pruning.torch_finished import FinishedSteps, FinishedUnits
from twofour.records.pruning import OutputError
from twofour.records.sensitivity import Measured, Measurement
from twofour.store import read_sealed, sealed, sha256_file, write_record

ERROR = OutputError(calibration=0.25, held_out=0.5)


def flipped(file: Path, rng: random.Random) -> None:
    """One bit of it."""
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def steps(folder: Path) -> tuple[FinishedSteps, Solved]:
    weight = np.arange(32, dtype=np.float16).reshape(4, 8)
    solved = Solved(
        weight=weight, bias_change=np.zeros(4, np.float32), output_error=ERROR, damping=0.01,
        refit_steps=3, kept_magnitude=0.75, note="a note",
    )  # fmt: skip
    done = FinishedSteps(folder=folder, key="k")
    done.save(["a", "b"], {"a": solved, "b": solved})
    return done, solved


def test_a_step_is_read_back_as_it_was_saved(tmp_path: Path) -> None:
    done, solved = steps(tmp_path)
    found = done.load(["a", "b"])
    assert found is not None
    assert [*found] == ["a", "b"]
    assert found["b"].output_error == ERROR
    assert (found["b"].note, found["b"].refit_steps) == ("a note", 3)
    assert np.array_equal(found["a"].weight, solved.weight)
    assert done.load(["a"]) is None


def test_a_step_with_any_bit_flipped_is_done_again(tmp_path: Path) -> None:
    rng = random.Random(0)
    for _ in range(60):
        done, _ = steps(tmp_path)
        (file,) = tmp_path.iterdir()
        flipped(file, rng)
        found = done.load(["a", "b"])
        if found is not None:  # a blank of the header's padding
            assert found["a"].output_error == ERROR
            assert np.array_equal(found["a"].weight, np.arange(32, dtype=np.float16).reshape(4, 8))


@pytest.mark.parametrize("name", ["state.json", "array-0.bin"])
def test_a_calibration_whose_folder_was_changed_begins_anew(tmp_path: Path, name: str) -> None:
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    files = {"array-0.bin": write_array(tmp_path / "array-0.bin", values)}
    assert files["array-0.bin"] == sha256_file(tmp_path / "array-0.bin")
    pieces = [Finished(piece=0, solution=Solution(method="admm", output_error=ERROR))]
    write_finished(tmp_path, "k", pieces, files)
    assert finished(tmp_path, "k") == (tuple(pieces), files)
    (tmp_path / "mine").mkdir()
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content.replace(b"0.25", b"0.26").replace(b"\x80?", b"\x80@"))
    assert (tmp_path / name).read_bytes() != content
    assert finished(tmp_path, "k") == ((), {})
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_parts_of_a_checkpoint_that_another_file_speaks_of_are_not_taken(tmp_path: Path) -> None:
    file = tmp_path / "units.json"
    units = FinishedUnits(file, "k")
    units.begin(["a"])
    assert FinishedUnits(file, "k").begun == ("a",)
    file.write_bytes(file.read_bytes().replace(b'"a"', b'"b"'))
    assert not FinishedUnits(file, "k").is_there


def test_a_measurement_that_was_edited_is_no_measurement(tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    kept = sealed(Measurement(key="k", measured=Measured(metrics={"accuracy": 1 / 3})))
    write_record(file, kept)
    assert read_sealed(Measurement, file) == kept
    file.write_bytes(file.read_bytes().replace(b"0.333", b"0.334"))
    with pytest.raises(BadInputError, match=r"m\.json was changed after it was written"):
        read_sealed(Measurement, file)
