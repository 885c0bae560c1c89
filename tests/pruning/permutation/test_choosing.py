"""Which order is taken: what it keeps, what it costs, and going on where a choice was killed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.onnx_models import load, save
from support.permuted_models import TWO_FOUR, Net, random_inputs, run

from twofour.graph.files import map_tensor
from twofour.graph.opened import OpenedModel, open_onnx
from twofour.pruning.permutation.apply import permute_onnx, same_outputs
from twofour.pruning.permutation.choosing import (
    ChoiceProgress,
    ClassOrder,
    Reorder,
    Search,
    choose_orders,
    orders_taken,
)
from twofour.pruning.permutation.classes import Classes, find_classes
from twofour.pruning.permutation.search import Stop, kept_score, search
from twofour.records.weights import Pattern
from twofour.store import from_json, to_json

Array = NDArray[Any]


def opened_net(net: Net, output: str, folder: Path) -> tuple[OpenedModel, Classes]:
    proto = net.model([output], {"x": [2, 8, 4, 4]})
    opened = open_onnx(save(proto, folder / "m.onnx"))
    return opened, find_classes(opened, TWO_FOUR)


def two_layers(folder: Path, *, width: int = 16) -> tuple[OpenedModel, Classes]:
    """Two inner convolutions behind one another, read by the second and by the head."""
    net = Net()
    first = net.add("Relu", net.conv("x", 8, width))
    second = net.add("Relu", net.conv(first, width, 2 * width))
    return opened_net(net, net.conv(second, 2 * width, 6), folder)


def values_of(opened: OpenedModel, classes: Classes) -> Callable[[str], Array]:
    return lambda name: map_tensor(classes.tensors[name], opened.path)


def chosen(
    opened: OpenedModel, classes: Classes, how: Search | None = None, **more: Any
) -> tuple[ClassOrder, ...]:
    how = Search(pattern=TWO_FOUR, steps=60) if how is None else how
    return choose_orders(classes, values_of(opened, classes), how, **more)


def kept(path: Path, name: str) -> float:
    stored = next(t for t in load(path).graph.initializer if t.name == name)
    values = np.abs(map_tensor(stored, path))
    return kept_score(np.moveaxis(values, 1, -1).reshape(-1, values.shape[1]), TWO_FOUR)


def test_the_order_that_is_taken_keeps_what_it_says(tmp_path: Path) -> None:
    opened, classes = two_layers(tmp_path)
    records = chosen(opened, classes)
    assert [record.taken for record in records] == [True, True]
    permute_onnx(opened, tmp_path / "p.onnx", classes, orders_taken(records))
    inputs = random_inputs(opened.proto)
    before, after = run(opened.path, inputs), run(tmp_path / "p.onnx", inputs)
    assert same_outputs(before, after, dtype="float32") is None
    for record, name in zip(records, ("c2", "c4"), strict=True):
        (layer,) = record.layers
        values = map_tensor(classes.tensors[name], opened.path)
        whole = float(np.abs(values).sum())
        assert layer.kept_before == pytest.approx(kept(opened.path, name) / whole)
        assert layer.kept == pytest.approx(kept(tmp_path / "p.onnx", name) / whole)
        found = search(np.abs(values).reshape(len(values), -1), TWO_FOUR, steps=60)
        assert record.efficacy == pytest.approx(found.efficacy)
        assert record.order == tuple(found.order)
        assert record.reason.startswith(f"keeps {100 * layer.kept:.2f} % of the scores, instead of")


def test_sizes_of_inputs_weigh_the_scores(tmp_path: Path) -> None:
    opened, classes = two_layers(tmp_path)
    layer = classes.classes[0].readers[0].layer
    sizes = np.linspace(0.1, 10, 16).reshape(1, 16, 1, 1)
    how = Search(pattern=TWO_FOUR, steps=60, scales={layer: sizes})
    plain, weighted = chosen(opened, classes), chosen(opened, classes, how)
    assert plain[0].order != weighted[0].order
    assert plain[1] == weighted[1], "another class, which none of this touches"


def test_all_readers_of_a_class_are_searched_over_together(tmp_path: Path) -> None:
    net = Net()
    stream = net.conv("x", 8, 16)
    heads = [net.conv(stream, 16, 24) for _ in range(2)]
    opened, classes = opened_net(net, net.add("Concat", *heads, axis=1), tmp_path)
    (record,) = chosen(opened, classes)
    stacked = np.concatenate(
        [np.abs(map_tensor(classes.tensors[n], opened.path)).reshape(24, 16) for n in ("c2", "c4")]
    )
    assert record.order == tuple(search(stacked, TWO_FOUR, steps=60).order)
    assert [layer.layer for layer in record.layers] == ["Conv_1", "Conv_2"]
    (alone,) = chosen(opened, classes, Search(pattern=TWO_FOUR, steps=60, layers={"Conv_2"}))
    assert [layer.layer for layer in alone.layers] == ["Conv_2"]
    assert alone.order != record.order
    assert chosen(opened, classes, Search(pattern=TWO_FOUR, layers=())) == ()


def test_every_group_of_a_convolution_has_an_order_of_its_own(tmp_path: Path) -> None:
    net = Net()
    inner = net.conv(net.conv("x", 8, 32), 32, 32, groups=2)
    opened, classes = opened_net(net, net.conv(inner, 32, 4), tmp_path)
    moved: list[Array] = []

    def score(layer: str, reorder: Reorder | None) -> float:
        if reorder is not None and layer == "Conv_1":
            places = np.tile(np.arange(16), (32, 1)).reshape(32, 16, 1, 1)
            moved.append(reorder(places).reshape(2, 16, 16))
        return 1.0 if reorder is None else 0.5

    how = Search(pattern=TWO_FOUR, steps=60, score=score)
    records = chosen(opened, classes, how)
    grouped = [record for record in records if record.layers[0].layer == "Conv_1"]
    assert len(grouped) == 2
    for halves, number, other in ((moved[0], 0, 1), (moved[1], 1, 0)):
        assert (halves[number] == grouped[number].order).all()
        assert (halves[other] == np.arange(16)).all(), "the other group stays meanwhile"


@pytest.mark.parametrize(("after", "taken"), [(0.4, True), (0.5, False), (0.6, False)])
def test_an_order_is_taken_only_where_the_output_error_falls(
    after: float, taken: bool, tmp_path: Path
) -> None:
    opened, classes = two_layers(tmp_path)
    asked: list[tuple[str, Reorder | None]] = []

    def score(layer: str, reorder: Reorder | None) -> float:
        asked.append((layer, reorder))
        return 0.5 if reorder is None else after

    records = chosen(opened, classes, Search(pattern=TWO_FOUR, steps=60, score=score))
    assert [record.taken for record in records] == [taken, taken]
    assert (records[0].layers[0].error_before, records[0].layers[0].error) == (0.5, after)
    words = "falls" if taken else "does not fall"
    assert records[0].reason == f"output error {words}: 0.5 to {after:.4g}"
    assert asked[0] == ("Conv_2", None)
    assert asked[1][1] is not None
    places = asked[1][1](np.tile(np.arange(16), (32, 1)).reshape(32, 16, 1, 1))
    assert (places.reshape(32, 16) == records[0].order).all(), "along the weight's own axis"
    assert set(orders_taken(records)) == ({r.key for r in records} if taken else set())


def test_a_gain_below_the_bound_is_left(tmp_path: Path) -> None:
    opened, classes = two_layers(tmp_path)
    records = chosen(opened, classes, Search(pattern=TWO_FOUR, steps=60, least_efficacy=0.99))
    assert [record.taken for record in records] == [False, False]
    assert records[0].reason.endswith("%, below 99 %: not worth a change")
    assert 0 < records[0].efficacy < 0.99


def test_a_class_of_one_group_has_nothing_to_search(tmp_path: Path) -> None:
    opened, classes = two_layers(tmp_path, width=4)
    record = chosen(opened, classes)[0]
    assert not record.taken
    assert record.reason == "not searched: its 4 channels make up 1 group of 4"


def test_groups_that_lie_inside_one_channel_have_nothing_to_search(tmp_path: Path) -> None:
    net = Net()
    flat = net.add("Flatten", net.conv("x", 8, 16))
    opened, classes = opened_net(net, net.linear(flat, 16 * 16, 8), tmp_path)
    (record,) = chosen(opened, classes)
    assert not record.taken
    assert record.reason == "not searched: no group of 4 consists of 4 of its 16 channels"


@pytest.mark.parametrize("pattern", [Pattern(1, 2), Pattern(4, 8)], ids=str)
def test_any_pattern_will_do(pattern: Pattern, tmp_path: Path) -> None:
    opened, _ = two_layers(tmp_path)
    classes = find_classes(opened, pattern)
    records = chosen(opened, classes, Search(pattern=pattern, steps=60))
    assert all(record.taken for record in records)


def test_weights_that_hold_the_channels_in_other_groups_are_judged(tmp_path: Path) -> None:
    net = Net()
    inner = net.conv("x", 8, 16)
    plain = net.conv(inner, 16, 32)
    wide = net.add("Reshape", inner, net.numbers(0, 4, 4, 4, 4))
    turned = net.add("Transpose", wide, perm=[0, 2, 1, 3, 4])
    shuffled = net.conv(net.add("Reshape", turned, net.numbers(0, -1, 4, 4)), 16, 4)
    opened, classes = opened_net(net, net.add("Concat", plain, shuffled, axis=1), tmp_path)
    (record,) = chosen(opened, classes)
    values = np.abs(map_tensor(classes.tensors["c2"], opened.path)).reshape(32, 16)
    assert record.efficacy == pytest.approx(search(values, TWO_FOUR, steps=60).efficacy)
    assert len(record.layers) == 2
    assert record.layers[1].kept != record.layers[1].kept_before


def test_a_killed_choice_goes_on_from_its_records(tmp_path: Path) -> None:
    opened, classes = two_layers(tmp_path)
    whole = chosen(opened, classes)
    saved: dict[str, str] = {}

    def save_and_die(step: ChoiceProgress) -> None:
        if step.record is not None:
            saved[step.record.key] = to_json(step.record)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chosen(opened, classes, progress=save_and_die)
    known = {key: from_json(ClassOrder, text) for key, text in saved.items()}
    assert list(known) == [classes.classes[0].key]
    seen: list[ChoiceProgress] = []
    again = chosen(opened, classes, known=known, progress=seen.append)
    assert again == whole
    assert {step.classes_done for step in seen if step.search is not None} == {1}
    assert seen[-1].classes_done == seen[-1].of == 2


def test_a_record_of_another_size_is_not_believed(tmp_path: Path) -> None:
    opened, classes = two_layers(tmp_path)
    whole = chosen(opened, classes)
    wrong = {whole[0].key: replace(whole[0], order=(1, 0))}
    assert chosen(opened, classes, known=wrong) == whole


def test_classes_that_time_does_not_reach_stay_and_say_so(tmp_path: Path) -> None:
    opened, classes = two_layers(tmp_path)
    records = chosen(opened, classes, Search(pattern=TWO_FOUR, seconds=0))
    assert [record.stop for record in records] == [Stop.SECONDS, Stop.SECONDS]
    assert {record.reason for record in records} == {"not searched: the time was up"}
    assert not any(record.taken for record in records)
    many = chosen(opened, classes, Search(pattern=TWO_FOUR, seconds=1000, steps=60))
    assert many == chosen(opened, classes)


def test_the_time_of_judging_is_not_that_of_searching(tmp_path: Path) -> None:
    opened, classes = two_layers(tmp_path)

    def slow(_layer: str, reorder: Reorder | None) -> float:
        time.sleep(0.3)
        return 0.5 if reorder is None else 0.4

    records = chosen(opened, classes, Search(pattern=TWO_FOUR, seconds=0.4, steps=5, score=slow))
    assert [record.taken for record in records] == [True, True]


def test_keys_hang_on_the_graph_alone(tmp_path: Path) -> None:
    keys = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        keys.append([each.key for each in two_layers(folder)[1].classes])
    assert keys[0] == keys[1]
    assert len(set(keys[0])) == 2
