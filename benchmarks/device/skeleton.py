"""ONNX files without their large weights, and back with random ones: 2.7 GB travel as a few MB.

    python3 -m device.skeleton strip NETS OUT.tar.xz
    python3 -m device.skeleton fill IN.tar.xz NETS

Of a float weight only mean and standard deviation are kept, and `fill` draws normal numbers with
them. Which kernels TensorRT can use depends on shapes, types and the 2:4 pattern, which pruning
makes afterwards, and not on the values. Needs numpy and onnx alone.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

LEAST_VALUES = 4096
"""Smaller weights stay as they are."""
_LARGEST_PROTO = 1 << 30
MODEL, STATISTICS = "dense.onnx", "statistics.json"


def strip(nets: Path, target: Path) -> None:
    """Every NETS/<name>/dense.onnx, its statistics beside it."""
    with tarfile.open(target, "w:xz") as tar:
        for file in sorted(nets.glob(f"*/{MODEL}")):
            model = onnx.load(str(file))
            statistics = {t.name: _emptied(t) for t in model.graph.initializer if _is_large(t)}
            contents = {MODEL: model.SerializeToString(), STATISTICS: _json(statistics)}
            for name, content in contents.items():
                member = tarfile.TarInfo(f"{file.parent.name}/{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def fill(source: Path, nets: Path) -> None:
    """Make the folders of `strip` again; one that is whole already is left alone."""
    with tarfile.open(source) as tar:
        for name in sorted({Path(name).parent.name for name in tar.getnames()}):
            folder = nets / name
            if (folder / MODEL).is_file():
                continue
            unfinished = nets / f"{name}.part"
            unfinished.mkdir(parents=True, exist_ok=True)
            model = onnx.load_from_string(_content(tar, f"{name}/{MODEL}"))
            _fill(model, json.loads(_content(tar, f"{name}/{STATISTICS}")))
            large = model.ByteSize() > _LARGEST_PROTO
            onnx.save(model, str(unfinished / MODEL), save_as_external_data=large)
            unfinished.rename(folder)
            print(name, "made", flush=True)


def _is_large(tensor: TensorProto) -> bool:
    kinds = (TensorProto.FLOAT, TensorProto.FLOAT16)
    return tensor.data_type in kinds and np.prod(tensor.dims) >= LEAST_VALUES


def _emptied(tensor: TensorProto) -> tuple[float, float]:
    """Mean and standard deviation of what is taken away."""
    array = numpy_helper.to_array(tensor).astype(np.float64)
    for field in ("raw_data", "float_data", "int32_data", "external_data"):
        tensor.ClearField(field)
    tensor.data_location = TensorProto.DEFAULT
    return float(array.mean()), float(array.std())


def _fill(model: onnx.ModelProto, statistics: dict[str, tuple[float, float]]) -> None:
    rng = np.random.default_rng(0)
    for tensor in model.graph.initializer:
        if tensor.name in statistics:
            mean, deviation = statistics[tensor.name]
            array = rng.standard_normal(tuple(tensor.dims), np.float32)
            array = array * np.float32(deviation) + np.float32(mean)
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            tensor.raw_data = array.astype(dtype).tobytes()


def _json(statistics: dict[str, tuple[float, float]]) -> bytes:
    return json.dumps(statistics).encode()


def _content(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    assert file is not None, name
    return file.read()


if __name__ == "__main__":
    work = {"strip": strip, "fill": fill}[sys.argv[1]]
    work(Path(sys.argv[2]), Path(sys.argv[3]))
