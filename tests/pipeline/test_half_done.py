"""Work that is half done is gone on with only where it is as it was left, to the last bit."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from twofour.calibrate.finished_steps import FinishedSteps
from twofour.errors import BadInputError
from twofour.pruning.solve import SolvedLayer
from twofour.records.run import Measured, Measurement
from twofour.records.weights import OutputError
from twofour.store import read_sealed, sealed, write_record

ERROR = OutputError(calibration=0.25, held_out=0.5)


def flipped(file: Path, rng: random.Random) -> None:
    """One bit of it."""
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def steps(folder: Path) -> tuple[FinishedSteps, SolvedLayer]:
    weight = np.arange(32, dtype=np.float16).reshape(4, 8)
    solved = SolvedLayer(
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
    without = replace(done, key="other", with_weights=False)
    without.save(["a"], {"a": solved})
    found = without.load(["a"])
    assert found is not None
    assert found["a"].weight is None
    assert found["a"].bias_change is not None


def test_a_step_with_any_bit_flipped_is_done_again(tmp_path: Path) -> None:
    rng = random.Random(0)
    for _ in range(60):
        done, _ = steps(tmp_path)
        flipped(rng.choice(sorted(tmp_path.iterdir())), rng)
        found = done.load(["a", "b"])
        if found is not None:  # a blank between two fields
            assert found["a"].output_error == ERROR
            assert np.array_equal(found["a"].weight, np.arange(32, dtype=np.float16).reshape(4, 8))


def test_a_measurement_that_was_edited_is_no_measurement(tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    kept = sealed(Measurement(key="k", measured=Measured(metrics={"accuracy": 1 / 3})))
    write_record(file, kept)
    assert read_sealed(Measurement, file) == kept
    file.write_bytes(file.read_bytes().replace(b"0.333", b"0.334"))
    with pytest.raises(BadInputError, match=r"m\.json was changed after it was written"):
        read_sealed(Measurement, file)
