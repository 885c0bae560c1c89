"""Every kind of layer is found, with its axis and its name in the state dict."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import twofour
from twofour.errors import BadInputError
from twofour.pruning.torch import find_module_weights, make_permanent
from twofour.records.weights import ReasonCode, Weight


def only(module: nn.Module) -> Weight:
    (weight,) = find_module_weights(nn.Sequential(module))
    return weight


def facts(weight: Weight) -> tuple[object, ...]:
    channels = (weight.in_channels, weight.out_channels)
    return weight.op, weight.shape, weight.axis, weight.groups, channels, weight.kernel


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Linear(12, 8), ("Linear", (8, 12), 1, 1, (12, 8), ())),
        (nn.Conv1d(12, 8, 3), ("Conv1d", (8, 12, 3), 1, 1, (12, 8), (3,))),
        (nn.Conv2d(12, 8, (3, 1)), ("Conv2d", (8, 12, 3, 1), 1, 1, (12, 8), (3, 1))),
        (nn.Conv3d(4, 8, 1), ("Conv3d", (8, 4, 1, 1, 1), 1, 1, (4, 8), (1, 1, 1))),
        (nn.Conv2d(12, 8, 3, groups=4), ("Conv2d", (8, 3, 3, 3), 1, 4, (12, 8), (3, 3))),
        (nn.ConvTranspose1d(12, 8, 3), ("ConvTranspose1d", (12, 8, 3), 0, 1, (12, 8), (3,))),
        (
            nn.ConvTranspose2d(12, 8, 2, groups=2),
            ("ConvTranspose2d", (12, 4, 2, 2), 0, 2, (12, 8), (2, 2)),
        ),
    ],
)
def test_each_kind_of_layer_has_its_axis(module: nn.Module, expected: tuple[object, ...]) -> None:
    weight = only(module)
    assert facts(weight) == expected
    assert (weight.layer, weight.weight, weight.node) == ("0", "0.weight", None)
    assert (weight.dtype, weight.math_dtype, weight.reasons) == ("float32", "float32", ())


@pytest.mark.filterwarnings("ignore:.*(nested|CSR)")
@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr", "nested"])
def test_a_weight_that_is_no_ordinary_tensor_is_refused_by_its_layer(kind: str) -> None:
    dense = torch.randn(32, 32)
    odd = {
        "sparse_coo": dense.to_sparse(),
        "sparse_csr": dense.to_sparse_csr(),
        "nested": torch.nested.nested_tensor([dense, dense[:3]]),
    }[kind]
    plain, strange = nn.Linear(32, 32), nn.Linear(32, 32)
    strange.weight = nn.Parameter(odd, requires_grad=False)
    model, before = nn.Sequential(plain, strange), plain.weight.detach().clone()
    with pytest.raises(BadInputError, match=f"layer '1': 1.weight is {kind}") as caught:
        twofour.prune(model)
    assert caught.value.hint
    assert torch.equal(plain.weight, before)


def test_a_model_that_is_itself_a_layer_has_a_plain_key() -> None:
    (weight,) = find_module_weights(nn.Linear(8, 4, dtype=torch.bfloat16))
    assert (weight.layer, weight.weight, weight.dtype) == ("", "weight", "bfloat16")


def test_packed_attention_is_one_weight_beside_its_output_projection() -> None:
    packed, out = find_module_weights(nn.Sequential(nn.MultiheadAttention(8, 2)))
    assert (packed.weight, *facts(packed)) == (
        *("0.in_proj_weight", "MultiheadAttention", (24, 8), 1, 1, (8, 24), ()),
    )
    assert (out.layer, out.weight) == ("0.out_proj", "0.out_proj.weight")
    assert out.op == "NonDynamicallyQuantizableLinear"


def test_conv1d_of_transformers_reduces_over_its_first_axis() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    for kind in (conv1d, type("Own", (conv1d,), {})):
        weight = only(kind(24, 8))
        assert facts(weight) == (kind.__name__, (8, 24), 0, 1, (8, 24), ())


def test_a_lazy_layer_is_refused_by_name() -> None:
    with pytest.raises(BadInputError, match=r"'1' .LazyLinear. is lazy"):
        find_module_weights(nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4)))


class Hyper(nn.Linear):
    """A layer whose weight is made in every forward."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        del self.weight
        self.weight = torch.zeros(8, 8)  # no parameter on purpose


def test_a_computed_weight_is_not_constant_and_one_in_a_buffer_is() -> None:
    weight = only(Hyper())
    assert (weight.weight, weight.axis) == (None, None)
    assert [r.code for r in weight.reasons] == [ReasonCode.NOT_CONSTANT]
    module = Hyper()
    del module.weight
    module.register_buffer("weight", torch.ones(8, 8))
    assert (only(module).weight, only(module).axis) == ("0.weight", 1)


def test_a_packed_type_is_left_alone_and_says_so() -> None:
    module = nn.Linear(8, 8)
    module.weight = nn.Parameter(torch.ones(8, 8, dtype=torch.int8), requires_grad=False)
    weight = only(module)
    assert weight.axis is None
    assert [r.code for r in weight.reasons] == [ReasonCode.DTYPE]


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16)
        self.other = nn.Linear(8, 16)
        self.head.weight = self.table.weight
        self.other.weight = nn.Parameter(self.table.weight.detach())


def test_users_of_one_array_name_each_other_and_the_embedding() -> None:
    head, other = find_module_weights(TiedHead())
    assert head.tied_to == ("table", "other")
    assert other.tied_to == ("table", "head")
    assert head.looked_up_by == other.looked_up_by == ("table",)
    assert [r.message for r in head.reasons] == ["the array is shared with other (Linear)"]


def test_a_module_used_twice_has_a_row_for_each_path() -> None:
    layer = nn.Linear(8, 8)
    rows = find_module_weights(nn.Sequential(layer, nn.ReLU(), layer))
    assert [(w.weight, w.tied_to) for w in rows] == [("0.weight", ("2",)), ("2.weight", ("0",))]


class Halve(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def parametrized(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", Halve())


def masked(layer: nn.Module) -> nn.Module:
    prune.l1_unstructured(layer, "weight", amount=0.5)  # type: ignore[no-untyped-call]
    prune.l1_unstructured(layer, "bias", amount=0.5)  # type: ignore[no-untyped-call]
    return layer


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_modules_are_refused_with_what_to_prune() -> None:
    made = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    traced: nn.Module = torch.jit.trace(made, torch.ones(1, 8))  # type: ignore[no-untyped-call]  # torch's
    graph = torch.fx.Graph()  # as torch.export leaves one
    graph.output(graph.call_function(torch.relu, (graph.placeholder("x"),)))
    operators = torch.fx.GraphModule(nn.Module(), graph)
    for module in (traced, nn.Sequential(traced), operators):
        for calibrate in (None, [torch.ones(4, 8)]):
            reason = "is (TorchScript|a graph of operators), whose layers"
            with pytest.raises(BadInputError, match=reason) as error:
                twofour.prune(module, calibrate=calibrate)
            assert "the nn.Module" in (error.value.hint or "")


class OwnLinear(nn.Linear):
    pass


@pytest.mark.parametrize(
    "wrap",
    [parametrized, masked, weight_norm, spectral_norm, parametrizations.weight_norm],
    ids=["parametrize", "prune", "weight_norm", "spectral_norm", "parametrized weight_norm"],
)
def test_making_weights_permanent_changes_no_output(wrap: object) -> None:
    assert callable(wrap)
    torch.manual_seed(0)
    model = nn.Sequential(wrap(OwnLinear(8, 4)), nn.ReLU()).eval()
    inputs = torch.randn(3, 8)
    expected = model(inputs)
    (before,) = find_module_weights(model)
    assert "0.weight" in make_permanent(model)
    (after,) = find_module_weights(model)
    assert (before.weight, before.op, before.shape) == (after.weight, after.op, after.shape)
    assert sorted(model.state_dict()) == ["0.bias", "0.weight"]
    assert (after.op, type(model[0])) == ("OwnLinear", OwnLinear)
    assert torch.allclose(model(inputs), expected)
    assert make_permanent(model) == ()
