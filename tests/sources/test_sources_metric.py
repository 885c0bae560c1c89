import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from twofour.errors import BadInputError
from twofour.sources.user_code import run_metric


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("m", None)


def _run(body: str) -> dict[str, float]:
    Path("m.py").write_text(f"import numpy, torch\ndef evaluate(predict):\n    {body}\n")
    return run_metric("m.py:evaluate", ["x"], lambda given: {"y": 2 * np.asarray(given["x"])})


@pytest.mark.parametrize(
    ("body", "figures"),
    [
        ("return predict(0.25)[0]", {"evaluate": 0.5}),
        ("return 1", {"evaluate": 1.0}),
        ("return numpy.float32(0.5)", {"evaluate": 0.5}),
        ("return torch.tensor([3])", {"evaluate": 3.0}),
        ("return {'top1': 0.5, 'top5': numpy.float64(1)}", {"top1": 0.5, "top5": 1.0}),
    ],
)
def test_a_metric_gives_one_number_or_several_by_name(body: str, figures: dict[str, float]) -> None:
    result = _run(body)
    assert result == figures
    assert all(type(value) is float for value in result.values())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError('no data')", "raised ValueError: no data (m.py, line 3: raise Value"),
        ("return None", "returned evaluate of type NoneType, not a number"),
        ("return {}", "returned evaluate of type dict, not a number"),
        ("return {'a': 'b'}", "returned a of type str, not a number"),
        ("return True", "returned evaluate of type bool, not a number"),
        ("return float('nan')", "returned evaluate = nan"),
        ("return predict()[0]", "m.py:evaluate: predict was given 0 arrays, the model takes 1"),
        ("return torch.ones(2)", "returned no single number for 'evaluate'"),
    ],
)
def test_a_metric_that_gives_no_number_is_refused(body: str, message: str) -> None:
    with pytest.raises(BadInputError) as caught:
        _run(body)
    assert message in caught.value.message


def test_both_variants_see_the_same_random_numbers() -> None:
    body = "import random; return {'a': random.random(), 'b': float(torch.rand(1))}"
    assert _run(body) == _run(body)
