"""benchmarks/engines.py: the networks it makes, the order it builds them in, what it keeps."""

from __future__ import annotations

import gzip
import itertools
import json
import tarfile
from pathlib import Path

import engines
import numpy as np
import onnx
import onnxruntime
import pytest
from engine_matrix import making, running
from engine_matrix.packing import pack
from engine_matrix.plan import NETS, Case, cases
from engine_matrix.quantized import quantize
from engine_matrix.sweep import CHAINS, Chain, circuit, write_sweep
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from twofour.export.int8 import quantize_int8
from twofour.graph.opened import open_onnx


@given(st.sets(st.integers(1, 99), min_size=1, max_size=7))
def test_a_circuit_has_each_ordered_pair_of_counts_exactly_once(counts: set[int]) -> None:
    visits = list(circuit(sorted(counts)))
    pairs = list(itertools.pairwise(visits))
    assert sorted(pairs) == sorted(itertools.product(counts, repeat=2))
    assert visits[0] == visits[-1] == min(counts)


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_a_valid_network_with_a_weight_for_each_pair(name: str, tmp_path: Path) -> None:
    known = CHAINS[name]
    chain = Chain(op=known.op, kernel=known.kernel, groups=known.groups, channels=(32, 64))
    write_sweep(chain, tmp_path / "chain.onnx")
    onnx.checker.check_model(tmp_path / "chain.onnx", full_check=True)
    found = open_onnx(tmp_path / "chain.onnx").weights().weights
    assert [weight.op for weight in found] == [chain.op] * 4
    assert {weight.groups for weight in found} == {chain.groups}
    assert {weight.dtype for weight in found} == {"float16"}
    pairs = [(32, 32), (32, 64), (64, 64), (64, 32)]
    kernel = {"Conv": (chain.kernel,) * 2}.get(chain.op, ())
    for weight, (channels, outputs) in zip(found, pairs, strict=True):
        shape = (channels, outputs) if chain.op == "MatMul" else (outputs, channels // chain.groups)
        assert weight.shape == (*shape, *kernel)


def test_float_weights_behind_a_quantizer_give_what_int8_weights_give(tmp_path: Path) -> None:
    chain = Chain(op="Conv", kernel=3, channels=(8, 16))
    write_sweep(chain, tmp_path / "chain.onnx")
    examples = {"x": np.random.default_rng(1).standard_normal((2, 8, 14, 14)).astype(np.float32)}
    quantize_int8(tmp_path / "chain.onnx", tmp_path / "int8.onnx", examples)
    quantize(tmp_path / "chain.onnx", tmp_path / "float.onnx", examples)
    graph = onnx.load(tmp_path / "float.onnx").graph
    of_weights = [n for n in graph.node if n.op_type == "QuantizeLinear" and "weight" in n.name]
    assert len(of_weights) == 4
    assert all(t.data_type != onnx.TensorProto.INT8 or len(t.dims) < 2 for t in graph.initializer)
    outputs = [
        onnxruntime.InferenceSession(tmp_path / name, providers=["CPUExecutionProvider"]).run(
            None, examples
        )[0]
        for name in ("int8.onnx", "float.onnx")
    ]
    np.testing.assert_array_equal(*outputs)


def test_every_network_is_built_once_for_each_precision_and_batch() -> None:
    names = [case.name for case in cases()]
    assert len(names) == len(set(names)) == 2 * (len(NETS) + 2 * 6)
    assert [case.batch for case in cases()[: 2 * len(NETS)]] == [8] * 2 * len(NETS)
    assert names[:3] == [
        "sweep_conv3x3-float16-b8",
        "resnet50-float16-b8",
        "sweep_conv1x1-float16-b8",
    ]


def test_a_build_asks_for_the_batch_in_the_shapes(tmp_path: Path) -> None:
    case = Case(net="sweep_conv1x1", precision="float16", batch=64)
    (tmp_path / case.folder).mkdir()
    write_sweep(Chain(op="Conv", channels=(8,)), tmp_path / case.folder / "dense.onnx")
    folders = running.Folders(nets=tmp_path, engines=tmp_path / "engines", engine="tensorrt")
    command = running.build_command(case, folders)
    assert command[command.index("--shapes") + 1] == "x=64x8x14x14"
    assert "--all-layers" in command


def test_a_run_goes_on_where_it_was_stopped_and_keeps_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nets, built = tmp_path / "nets", tmp_path / "engines"
    both = [Case(net=f"sweep_{n}", precision="float16", batch=1) for n in ("conv1x1", "gemm")]
    monkeypatch.setattr(engines, "cases", lambda: both)
    for case in both:
        (nets / case.folder).mkdir(parents=True)
    write_sweep(Chain(op="Conv", channels=(8,)), nets / both[0].folder / "dense.onnx")
    without_weights(nets / both[1].folder / "dense.onnx")
    build = ["build", str(nets), "--out", str(built), "--engine", "onnxruntime"]
    assert engines.main(build) == 1
    write_sweep(Chain(op="Gemm", channels=(8,)), nets / both[1].folder / "dense.onnx")
    assert engines.main(build) == 0
    lines = (built / "outcomes.jsonl").read_text().splitlines()
    outcomes = [(row["case"], row["exit_code"]) for row in map(json.loads, lines)]
    assert outcomes == [(both[0].name, 0), (both[1].name, 2), (both[1].name, 0)]
    assert "no layer that could be pruned" in json.loads(lines[1])["said"]


def test_a_network_that_was_not_written_to_its_end_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(_chain: Chain, path: Path) -> None:
        path.write_bytes(b"half of it")
        raise KeyboardInterrupt

    make = ["make", "--out", str(tmp_path), "--only", "sweep_conv3x3g32", "--precision", "float16"]
    with monkeypatch.context() as during:
        during.setattr(making, "write_sweep", killed)
        with pytest.raises(KeyboardInterrupt):
            engines.main(make)
    assert not (tmp_path / "sweep_conv3x3g32-float16").exists()
    assert engines.main(make) == 0
    onnx.checker.check_model(tmp_path / "sweep_conv3x3g32-float16" / "dense.onnx")
    assert [entry.name for entry in tmp_path.iterdir()] == ["sweep_conv3x3g32-float16"]


@pytest.mark.parametrize("command", ["build", "compare"])
def test_a_folder_without_networks_is_an_error(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert engines.main([command, str(tmp_path), "--out", str(tmp_path / "engines")]) == 2
    assert "sweep_conv3x3-float16-b8" in capsys.readouterr().err


def test_compare_runs_what_was_built_with_the_engine_that_was_asked_for(tmp_path: Path) -> None:
    case = Case(net="sweep_conv1x1", precision="float16", batch=8)
    folders = running.Folders(nets=tmp_path, engines=tmp_path, engine="onnxruntime")
    assert running.waiting([case], folders, running.LATENCY) == []
    (tmp_path / case.name).mkdir()
    (tmp_path / case.name / running.REPORT).touch()
    assert running.waiting([case], folders, running.LATENCY) == [case]
    command = running.compare_command(case, folders)
    assert command[command.index("--engines") + 1] == "onnxruntime:cpu"


def test_a_command_ends_with_the_budget(tmp_path: Path) -> None:
    case = Case(net="sweep_conv1x1", precision="float16", batch=1)
    (tmp_path / case.folder).mkdir()
    write_sweep(Chain(op="Conv", channels=(8,)), tmp_path / case.folder / "dense.onnx")
    folders = running.Folders(nets=tmp_path, engines=tmp_path / "engines", engine="onnxruntime")
    (outcome,) = running.run_all([case, case], running.build_command, folders, 0.05)
    assert outcome.exit_code is None
    assert "rest of the budget" in outcome.said


def test_archives_hold_logs_and_records_and_begin_anew_at_the_limit(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        folder = tmp_path / "engines" / name
        folder.mkdir(parents=True)
        (folder / "sparse.log").write_bytes(rng.bytes(300_000))
        (folder / "build.json").write_text("{}")
        (folder / "sparse.plan").write_bytes(b"large")
    archives = pack(tmp_path / "engines", tmp_path / "kept", limit_bytes=250_000)
    assert [path.name for path in archives] == ["kept-0.tar", "kept-1.tar"]
    members = []
    for path in archives:
        with tarfile.open(path) as archive:
            members += archive.getnames()
    names = ["a/build.json", "a/sparse.log", "b/build.json", "b/sparse.log"]
    assert members == [f"{name}.gz" for name in names]
    with tarfile.open(archives[0]) as archive:
        kept = archive.extractfile("a/sparse.log.gz")
        assert kept is not None
        log = (tmp_path / "engines" / "a" / "sparse.log").read_bytes()
        assert gzip.decompress(kept.read()) == log


def test_packing_nothing_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert engines.main(["pack", str(tmp_path / "nope"), "--to", str(tmp_path / "kept")]) == 2
    assert "no run folder in" in capsys.readouterr().err


def without_weights(path: Path) -> None:
    tensors = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 8]) for n in "xy"]
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])], "g", tensors[:1], tensors[1:]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
