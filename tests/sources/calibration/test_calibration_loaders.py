"""Batches of the caller: tensors, dicts, lists, loaders, generators; in memory and read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
import pytest
import torch
from support.calibration_data import joined, onnx_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from twofour.errors import BadInputError
from twofour.inputs.samples import CalibrationData, ModelInputs
from twofour.sources.calibration.kinds import loaded_inputs, module_inputs
from twofour.sources.calibration.loaders import calibration_from_value, torch_call
from twofour.sources.source import ExampleCall, loaded_module

X = torch.arange(20 * 3, dtype=torch.float32).reshape(20, 3)


class Net(nn.Module):
    """One input that is needed, one that is not, and a switch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, profile: bool = False
    ) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return out if mask is None or profile else out * mask


class Single(nn.Module):
    """One input and a switch, as detectors have."""

    def forward(self, x: torch.Tensor, augment: bool = False) -> torch.Tensor:
        return x if not augment else -x


NET = module_inputs(Net())


def opened(value: object, inputs: ModelInputs = NET, samples: int = 1024) -> CalibrationData:
    return calibration_from_value(value, inputs, samples=samples)


@pytest.mark.parametrize(
    "make",
    [
        lambda: X,
        X.numpy,
        lambda: {"x": X},
        lambda: [X[:7], X[7:]],
        lambda: X.chunk(4),
        lambda: [[X[:7]], [X[7:]]],
        lambda: [{"x": X[:7].numpy()}, {"x": X[7:]}],
        lambda: (batch for batch in X.chunk(3)),
        lambda: DataLoader(TensorDataset(X), batch_size=7),
    ],
)
def test_every_way_of_writing_batches_gives_the_same_samples(make: Callable[[], object]) -> None:
    data = opened(make())
    assert data.samples == 20
    assert np.array_equal(joined(data), X.numpy())
    assert np.array_equal(joined(data), X.numpy()), "and again"
    assert max(batch.samples for batch in data.batches()) <= 8


def test_an_endless_generator_is_asked_for_no_more_than_is_needed() -> None:
    asked = []

    def endless() -> Iterator[torch.Tensor]:
        while True:
            asked.append(1)
            yield X[:4]

    data = opened(endless(), samples=10)
    assert data.samples == 10
    assert len(asked) == 3


def test_bfloat16_is_kept_through_the_disk() -> None:
    inputs = module_inputs(Net().to(torch.bfloat16))
    data = opened((batch for batch in X.to(torch.bfloat16).chunk(3)), inputs)
    assert joined(data).dtype == ml_dtypes.bfloat16
    assert np.array_equal(joined(data).astype(np.float32), X.to(torch.bfloat16).float().numpy())


def test_floats_become_the_type_of_the_weights() -> None:
    assert joined(opened(X.numpy().astype(np.float64))).dtype == np.float32
    assert joined(opened(X, module_inputs(Net().half()))).dtype == np.float16
    assert joined(opened(X, module_inputs(Net().double()))).dtype == np.float64


def test_keys_that_no_argument_takes_are_left_out_and_named() -> None:
    data = opened({"x": X, "labels": ["a"] * 20})
    assert [*next(data.batches()).arrays] == ["x"]
    assert "labels is not" in data.notes[-1]


Y = torch.arange(20)
PAIRS = (
    "calibrate gives pairs: the first of each is the model's input, the second is taken for labels "
    "and left out"
)


@pytest.mark.parametrize(
    "value",
    [
        DataLoader(TensorDataset(X, Y), batch_size=7),
        [(X[:7], Y[:7].numpy()), (X[7:].numpy(), Y[7:])],
        ((x, {"boxes": y, "of": [y, y]}) for x, y in zip(X.chunk(3), Y.chunk(3), strict=True)),
        [(X, ["a"] * 20)],
        [(X, (Y, X))],
        [(X[i : i + 1], i) for i in range(20)],
        [(X, X[:, :2])],
    ],
    ids=["loader", "list", "targets", "names", "several", "one by one", "values"],
)
def test_of_inputs_and_labels_a_lone_input_takes_the_inputs(value: object) -> None:
    data = opened(value, module_inputs(Single()))
    assert data.samples == 20
    assert np.array_equal(joined(data), X.numpy())
    assert data.notes[-1] == PAIRS
    assert PAIRS not in opened([(X,)], module_inputs(Single())).notes


def test_a_second_array_that_a_parameter_takes_is_no_label() -> None:
    data = opened([(X, torch.ones(20, 1))])
    assert [*next(data.batches()).arrays] == ["x", "mask"]
    assert PAIRS not in data.notes


@pytest.mark.parametrize(
    "value",
    [(X, Y), [(X, Y[:5])], [(X, Y, Y)], [[X[0], X[1]]]],
    ids=["two arrays alone", "another number of labels", "three", "two of a kind"],
)
def test_what_may_be_no_labels_is_explained(value: object) -> None:
    with pytest.raises(
        BadInputError, match=r"(?s)batch 0 is [23] arrays, and Single takes 1: x.*"
    ) as e:
        opened(value, module_inputs(Single()))
    assert "for inputs, _ in" in str(e.value)


class Encoder(nn.Module):
    """Ids, and a mask that may be left out, as encoders of transformers take them."""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        return input_ids if attention_mask is None else input_ids * attention_mask


def test_labels_do_not_pass_for_a_mask() -> None:
    ids, mask = torch.arange(20).reshape(4, 5), torch.tensor([[1, 1, 1, 0, 0]] * 4)
    for labels in (torch.zeros(4, dtype=torch.int64), ids - 100):
        with pytest.raises(BadInputError, match="batch 0: array 1"):
            opened([(ids, labels)], module_inputs(Encoder()))
    (batch,) = opened([(ids, mask)], module_inputs(Encoder())).batches()
    assert batch.padding is not None
    assert batch.padding.sum() == 8


def test_a_dataset_without_a_loader_is_explained() -> None:
    samples: list[tuple[torch.Tensor, object]] = [(X[0], 3), (X[0], torch.tensor(3))]
    for value, reason in (
        (TensorDataset(X, Y), "calibrate is of type TensorDataset"),
        *(([sample], "batch 0 is a single sample and its label") for sample in samples),
    ):
        with pytest.raises(BadInputError, match=reason) as error:
            opened(value, module_inputs(Single()))
        assert "DataLoader(dataset" in str(error.value)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "calibrate is of type NoneType"),
        ("data.npz", "calibrate is of type str"),
        ([], "calibrate contains no samples"),
        (X[:0], "batch 0 contains no samples"),
        ([X, "oops"], "batch 1: array 0 is of type str"),
        ([X, ("a", "b")], "batch 1: array 0 is of type str"),
        ([[1.0, 2.0]], "batch 0 is of type list of float, float"),
        ([X, {"y": X}], r"batch 1 contains y; the model takes x"),
        ([{"x": None}], "batch 0: 'x' is of type NoneType"),
        (torch.full((4, 3), torch.nan), "batch 0: the array for input x has 12 values"),
        (X.to_sparse(), "is a tensor without plain values"),
        (np.asarray([{}]), "has type object, not a number"),
    ],
)
def test_what_is_no_batch_is_refused_with_its_place(value: object, reason: str) -> None:
    with pytest.raises(BadInputError, match=reason):
        opened(value)


def test_a_wrong_rank_is_refused_where_an_example_tells_it() -> None:
    inputs = loaded_inputs(loaded_module(Net(), ExampleCall(args=(X[:2],))), "net")
    with pytest.raises(BadInputError, match="cannot be 20x3x1"):
        opened(X[:, :, None], inputs)


def test_padding_is_joined_with_its_samples() -> None:
    model = onnx_model(ids=("int64", (4, 5)), attention_mask=("int64", (4, 5)))
    mask = torch.ones(6, 5, dtype=torch.int64)
    mask[3, 2:] = 0
    batches = [
        {"ids": torch.zeros(3, 5, dtype=torch.int64), "attention_mask": mask[:3]},
        {"ids": torch.zeros(3, 5, dtype=torch.int64), "attention_mask": mask[3:]},
    ]
    (batch,) = opened(batches, model).batches()
    assert batch.padding is not None
    assert np.argwhere(batch.padding).tolist() == [[3, 2], [3, 3], [3, 4]]


def test_a_batch_is_a_call_in_the_order_of_forward() -> None:
    net = Net()
    (batch,) = opened({"mask": torch.ones(4, 1), "x": X[:4]}).batches()
    call = torch_call(net, batch)
    assert [tuple(t.shape) for t in call.args] == [(4, 3), (4, 1)]
    assert call.kwargs == {}
    assert torch.equal(net(*call.args, **call.kwargs), net(X[:4]))


class Open(nn.Module):
    """Takes whatever it is given by name."""

    def forward(self, x: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return x + named["bias"]


def test_a_forward_with_stars_is_called_by_position_and_name() -> None:
    net = Open()
    (batch,) = opened({"x": X[:4], "bias": X[4:8]}, module_inputs(net)).batches()
    call = torch_call(net, batch)
    assert torch.equal(net(*call.args, **call.kwargs), X[:4] + X[4:8])
