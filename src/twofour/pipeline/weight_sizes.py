"""Bytes of a model's weights in dense and sparse formats; time and memory of converting them."""

from __future__ import annotations

import contextlib
import timeit
import tracemalloc
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import prod

import numpy as np

from twofour.eligibility.rules import holds_trivially
from twofour.engines.machine import describe_machine
from twofour.errors import BadInputError
from twofour.graph.files import Array, numpy_dtype
from twofour.pipeline.folder import CHECKPOINT, SPARSE, WEIGHTS, is_run_folder, onnx_name
from twofour.pipeline.validating import validate_path
from twofour.pruning.formats import array_size, to_sparse, total_size
from twofour.pruning.verify import judged
from twofour.records.options import RunOptions
from twofour.records.run import ArraySize, Conversion, ModelSizes
from twofour.records.weights import HARDWARE_PATTERN, Selection, WeightCheck
from twofour.sources.source import OnnxSource, open_source, path_of

_MOST = 1 << 26
"""Most values of a matrix that is converted: torch's COO of so many takes 2.5 GiB in float32."""


def model_sizes(text: str, options: RunOptions) -> ModelSizes:
    """The sizes of a model source, a file of weights or a run folder; `options` has the data.

    Raises BadInputError for a model without weights of convolutions or matrix products, and for
    calibration data without a torch module to run on them.
    """
    path, given = path_of(text), tuple[ArraySize, ...]()
    if options.calibration.data is None and (path.is_file() or is_run_folder(path)):
        names = WEIGHTS, CHECKPOINT, onnx_name(SPARSE)
        path = next((path / name for name in names if (path / name).exists()), path)
        checks = validate_path(path, HARDWARE_PATTERN, Selection()).checks
    else:
        checks, given = _of_module(text, options)
    stored = {(check.file, check.weight): check for check in checks}.values()
    if not stored:
        raise BadInputError(f"{text} has no weight of a convolution or matrix product")
    weights = tuple(map(_size, stored))
    sizes = zip(weights, stored, strict=True)
    largest, check = max(sizes, key=lambda pair: pair[0].values * (pair[0].values <= _MOST))
    return ModelSizes(
        source=text,
        weights=weights,
        total=total_size(("all", ""), weights),
        activations=given,
        converted=largest.layer,
        conversions=measure_conversions(_matrix_like(largest, check.shape[0])),
        machine=describe_machine(),
    )


def _of_module(
    text: str, options: RunOptions
) -> tuple[tuple[WeightCheck, ...], tuple[ArraySize, ...]]:
    source = open_source(text, options)
    if isinstance(source, OnnxSource):
        hint = "name the torch model that the file was exported from"
        raise BadInputError(f"--calibrate: {text} is no torch module that can run", hint=hint)
    from twofour.calibrate.torch.activations import activation_sizes
    from twofour.pipeline.torch.weight_files import calls_of
    from twofour.pruning.torch.module_layers import array_of, find_module_weights, storage_key
    from twofour.sources.calibration.kinds import loaded_inputs, open_calibration
    from twofour.sources.calibration.loaders import array_from_tensor

    loaded, path = source.load(), path_of(text)
    found = [(w, array_of(loaded.module, w)) for w in find_module_weights(loaded.module)]
    stored = {storage_key(t): (w, partial(array_from_tensor, t)) for w, t in found if t is not None}
    weights = [weight for weight, _ in stored.values()]
    places = [(key, read) for key, (_, read) in stored.items()]
    checks = judged(path, weights, places, HARDWARE_PATTERN, ()).checks
    if options.calibration.data is None:
        return checks, ()
    inputs = loaded_inputs(loaded, text, path if path.is_dir() else None)
    data = open_calibration(options.calibration, inputs, seed=options.seed)
    return checks, activation_sizes(loaded.module, calls_of(loaded.module, data))


def _size(check: WeightCheck) -> ArraySize:
    assert check.dtype is not None, "judged here"
    itemsize, nonzeros = numpy_dtype(check.dtype).itemsize, prod(check.shape) - (check.zeros or 0)
    axis = None if holds_trivially(check.shape, check.axis, HARDWARE_PATTERN) else check.axis
    size = array_size((check.layer, check.dtype), check.shape, nonzeros, itemsize, axis)
    return replace(size, holds=None if axis is None else not check.violations)


def _matrix_like(of: ArraySize, rows: int) -> Array:
    """Ones, and as many zeros as the weight has, in its type; torch has no float8 of numpy's."""
    kind = np.dtype(np.int8) if "float8" in of.kind else numpy_dtype(of.kind)
    random = np.random.default_rng(0).random((rows, of.values // rows), np.float32)
    return (random < of.nonzeros / of.values).astype(kind)


def measure_conversions(matrix: Array) -> tuple[Conversion, ...]:
    """The matrix in COO and in CSR, by twofour and by torch, five times each, in one thread.

    In two threads beside other work, torch took a hundred times as long as alone.
    """
    import torch

    from twofour.sources.calibration.loaders import tensor_from_array

    tensor = tensor_from_array(matrix)
    ways: dict[str, Callable[[], object]] = {
        "twofour COO": partial(to_sparse, matrix, coo=True),
        "torch COO": tensor.to_sparse,
        "twofour CSR": partial(to_sparse, matrix, coo=False),
        "torch CSR": tensor.to_sparse_csr,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # torch says that its CSR is in beta
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        return tuple(
            Conversion(
                name=name,
                peak_bytes=max(bytes_held(convert)),
                samples_ms=tuple(1e3 * s for s in timeit.repeat(convert, number=1, repeat=5)),
            )
            for name, convert in ways.items()
        )


def bytes_held(convert: Callable[[], object]) -> list[int]:
    """What is held after each step of torch's allocator, on top of the peak of Python and numpy."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        tracemalloc.start()
        _result = convert()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    events = found.profiler.kineto_results.events()
    steps = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return [*accumulate((size for _, size in steps), initial=peak)]
