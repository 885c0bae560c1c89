import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from twofour.errors import BadInputError
from twofour.records.options import ExampleInputs
from twofour.sources.callable import CallableSource
from twofour.sources.source import LoadedModule
from twofour.sources.user_code import parse_reference, run_metric

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.fc = nn.Linear(width, 2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, scale=None):
        y = self.drop(self.fc(x))
        return y if scale is None else y * scale
"""

Write = Callable[[str, str], Path]


def _rows(loaded: LoadedModule) -> int:
    """Of the first example input."""
    return len(next(iter((*loaded.args, *loaded.kwargs.values()))))


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write a Python file of the user's into the current folder; its modules are forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write_file(name: str, code: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(code))
        return path

    yield write_file
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def _source(text: str, options: ExampleInputs | None = None) -> CallableSource:
    return CallableSource(
        text=text, reference=parse_reference(text), options=options or ExampleInputs()
    )


def _load(text: str, options: ExampleInputs | None = None) -> LoadedModule:
    return _source(text, options).load()


def _message(text: str, options: ExampleInputs | None = None) -> str:
    with pytest.raises(BadInputError) as caught:
        _load(text, options)
    return str(caught.value)


def test_a_module_with_a_tensor_as_example_is_loaded_in_eval_mode(write: Write) -> None:
    write("zoo.py", NET + "\ndef make():\n    return Net(), torch.ones(3, 4)\n")
    loaded = _load("zoo.py:make")
    assert not loaded.module.training
    assert not loaded.module.get_submodule("drop").training
    assert [tuple(a.shape) for a in loaded.args] == [(3, 4)]
    assert (loaded.kwargs, loaded.input_names, _rows(loaded)) == ({}, ("x",), 3)
    assert loaded.module(*loaded.args).shape == (3, 2)


@pytest.mark.parametrize(
    ("examples", "count", "names"),
    [
        ("[torch.ones(3, 4), torch.ones(2)]", 2, ("x", "scale")),
        ("(torch.ones(3, 4),)", 1, ("x",)),
        ("{'scale': torch.ones(2), 'x': torch.ones(3, 4)}", 0, ("x", "scale")),
        ("__import__('numpy').ones((3, 4), 'float32')", 1, ("x",)),
    ],
)
def test_example_inputs_come_by_position_or_by_name_in_the_order_of_forward(
    write: Write, examples: str, count: int, names: tuple[str, ...]
) -> None:
    write("zoo.py", NET + f"\ndef make():\n    return Net(), {examples}\n")
    loaded = _load("zoo.py:make")
    assert len(loaded.args) == count
    assert (*loaded.args, *loaded.kwargs.values())[0].shape == (3, 4)
    assert loaded.input_names == names
    assert _rows(loaded) == 3


def test_a_class_of_a_package_in_the_current_folder_can_be_named(write: Write) -> None:
    write("export/__init__.py", "")
    write("export/nets.py", NET)
    loaded = _load("export.nets:Net", ExampleInputs(input_shapes=((5, 4),)))
    assert type(loaded.module).__name__ == "Net"
    assert _rows(loaded) == 5


def test_a_name_that_holds_a_module_is_taken_as_it_is(write: Write) -> None:
    write("zoo.py", NET + "\nnet = Net()\nnet.example_input_array = torch.zeros(7, 4)\n")
    first, second = _load("zoo.py:net"), _load("zoo.py:net")
    assert _rows(first) == 7
    states = [m.module.state_dict()["fc.weight"] for m in (first, second)]
    assert torch.equal(*states)


def test_random_weights_and_inputs_are_the_same_on_every_load_and_follow_the_seed(
    write: Write,
) -> None:
    code = "\nimport random, numpy\ndef make():\n    net = Net()\n"
    code += "    net.draws = (random.random(), numpy.random.rand())\n    return net\n"
    write("zoo.py", NET + code)
    shapes = ((2, 4),)
    first = _load("zoo.py:make", ExampleInputs(input_shapes=shapes))
    torch.rand(5)
    again = _load("zoo.py:make", ExampleInputs(input_shapes=shapes))
    other = _load("zoo.py:make", ExampleInputs(input_shapes=shapes, seed=1))
    state, same, different = (m.module.state_dict()["fc.weight"] for m in (first, again, other))
    assert torch.equal(state, same)
    assert not torch.equal(state, different)
    assert torch.equal(first.args[0], again.args[0])
    assert not torch.equal(first.args[0], other.args[0])
    assert first.module.draws == again.module.draws


def test_arrays_by_name_and_by_position_come_from_the_npz_file(
    write: Write, tmp_path: Path
) -> None:
    write("zoo.py", NET + "\ndef make():\n    return Net(), torch.ones(1, 4)\n")
    np.savez(tmp_path / "named.npz", scale=np.full(2, 3.0), x=np.ones((6, 4)))
    np.savez(tmp_path / "plain.npz", np.ones((5, 4)), np.full(2, 3.0))
    named = _load("zoo.py:make", ExampleInputs(inputs=str(tmp_path / "named.npz")))
    plain = _load("zoo.py:make", ExampleInputs(inputs=str(tmp_path / "plain.npz")))
    assert list(named.kwargs) == ["x", "scale"]
    assert named.kwargs["x"].dtype == torch.float32
    assert (_rows(named), _rows(plain)) == (6, 5)
    assert plain.args[1].tolist() == [3.0, 3.0]


def test_sentences_and_sizes_of_no_rows_are_no_inputs_of_a_module(write: Write) -> None:
    write("zoo.py", NET)
    text = write("text.txt", "A sentence.")
    assert "cannot be used as inputs of Net" in _message(
        "zoo.py:Net", ExampleInputs(inputs=str(text))
    )
    none = ExampleInputs(input_shapes=((0, 4),))
    assert "has a dimension below 1" in _message("zoo.py:Net", none)


def test_arrays_of_objects_are_refused_because_reading_them_runs_code(
    write: Write, tmp_path: Path
) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
            return (Path.touch, (tmp_path / "ran",))

    write("zoo.py", NET)
    np.savez(tmp_path / "evil.npz", x=np.array([Payload()], dtype=object))
    text = _message("zoo.py:Net", ExampleInputs(inputs=str(tmp_path / "evil.npz")))
    assert "a readable .npz file" in text
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("code", "messages"),
    [
        (
            "def make():\n    depth = 3\n    raise ValueError(f'bad depth {depth}')\n",
            ["raised ValueError: bad depth 3 (bad.py, line 3: raise ValueError"],
        ),
        ("def make():\n    return 3\n", ["returned a value of type int", "return an nn.Module"]),
        (
            "def make(depth, *, width):\n    ...\n",
            ["needs arguments: missing a required argument: 'depth'"],
        ),
        ("def mkae():\n    ...\n", ["bad.py has no 'make'", "hint: it has mkae"]),
        ("make = 3\n", ["is of type int, not a callable"]),
        ("def make(:\n", ["cannot be imported: SyntaxError", "bad.py, line 1: def make(:"]),
        ("import nowhere_to_be_found\n", ["No module named 'nowhere_to_be_found'", "line 1"]),
        (
            "import torch\ndef make():\n    return {'w': torch.ones(1)}\n",
            ["returned a dict"],
        ),
        (
            "from torch import nn\ndef make():\n    return nn.Linear(2, 2)\n",
            ["without example inputs", "--input-shape"],
        ),
        (
            "import torch\ndef make():\n"
            "    return torch.nn.Linear(2, 2), ({'a': torch.ones(1, 2)},)\n",
            ["example input #0 is of type dict, not a tensor", "wrap the model in a module"],
        ),
        (
            "from torch import nn, ones\ndef make():\n    return nn.LazyLinear(2), ones(1, 2)\n",
            ["weight has no values (it is lazy"],
        ),
        (
            "from torch import nn, ones\n"
            "def make():\n    return nn.Linear(2, 2, device='meta'), ones(1, 2)\n",
            ["weight has no values"],
        ),
        (
            "import torch\ndef make():\n"
            "    return torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2))\n",
            ["returned a TorchScript module", "return the nn.Module it was made from"],
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_user_code_that_gives_no_module_is_an_error_that_names_its_line(
    write: Write, code: str, messages: list[str]
) -> None:
    write("bad.py", code)
    text = _message("bad.py:make")
    for message in messages:
        assert message in text


def test_an_interrupt_in_user_code_passes_through(write: Write) -> None:
    write("bad.py", "def make():\n    raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        _load("bad.py:make")


def test_a_module_that_is_not_there_is_named(write: Write) -> None:
    write("package/__init__.py", "")
    for name in ("nowhere.deep", "package.gone"):
        text = f"{name}:make"
        assert f"'{name}'" in _message(text)
        with pytest.raises(BadInputError, match=f"'{name}'"):
            _source(text).key()


def test_user_modules_win_while_they_are_imported_and_ours_afterwards(write: Write) -> None:
    write("sub/sibling.py", "VALUE = 4\n")
    write("rich/__init__.py", "MINE = True\n")
    path = write("sub/zoo.py", "import sys\nseen = list(sys.path)\n" + NET + "import sibling\n")
    before = list(sys.path)
    _load("sub/zoo.py:Net", ExampleInputs(input_shapes=((1, 4),)))
    assert sys.modules["zoo"].seen[:2] == [str(path.parent), str(Path.cwd())]
    assert sys.path[: len(before)] == before
    assert str(path.parent) in sys.path[len(before) :]


def test_an_edited_file_is_run_anew_and_a_file_called_like_the_library_does_no_harm(
    write: Write,
) -> None:
    options = ExampleInputs(input_shapes=((1, 4),))
    write("random.py", NET + "VERSION = 1\nnet = Net(4)\n")
    assert _load("random.py:net", options).module.state_dict()["fc.weight"].shape == (2, 4)
    write("random.py", NET + "VERSION = 2\nnet = Net(8)\n")
    options = ExampleInputs(input_shapes=((1, 8),))
    assert _load("random.py:net", options).module.state_dict()["fc.weight"].shape == (2, 8)
    assert not hasattr(sys.modules["random"], "VERSION")


def test_the_key_follows_the_file_the_name_and_the_options(write: Write) -> None:
    write("zoo.py", "import conv\ndef make(): ...\ndef other(): ...\n")
    keys = [_source("zoo.py:make").key(), _source("zoo.py:other").key()]
    keys.append(_source("zoo.py:make", ExampleInputs(seed=3)).key())
    keys.append(_source("zoo.py:make", ExampleInputs(input_shapes=((1, 2),))).key())
    write("zoo.py", "import conv\ndef make(): ...\n")
    keys.append(_source("zoo.py:make").key())
    assert len(set(keys)) == 5
    write("conv.py", "raise SystemExit\n")
    assert _source("zoo.py:make").key() == keys[-1]


def test_the_key_of_a_module_follows_its_file_which_is_not_run(write: Write) -> None:
    write("pack/__init__.py", "")
    write("pack/model.py", "raise SystemExit\n")
    before = _source("pack.model:make").key()
    assert before == _source("pack.model:make").key()
    write("pack/model.py", "raise SystemError\n")
    assert _source("pack.model:make").key() != before
    assert len(_source("torch.nn.modules.linear:Linear").key()) == 64


# --- metrics --------------------------------------------------------------------------------------


def _figures(write: Write, body: str) -> dict[str, float]:
    write("m.py", f"import numpy, torch\ndef evaluate(predict):\n    {body}\n")
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
def test_a_metric_gives_one_number_or_several_by_name(
    write: Write, body: str, figures: dict[str, float]
) -> None:
    result = _figures(write, body)
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
def test_a_metric_that_gives_no_number_is_refused(write: Write, body: str, message: str) -> None:
    with pytest.raises(BadInputError) as caught:
        _figures(write, body)
    assert message in caught.value.message


def test_both_variants_see_the_same_random_numbers(write: Write) -> None:
    body = "import random; return {'a': random.random(), 'b': float(torch.rand(1))}"
    assert _figures(write, body) == _figures(write, body)
