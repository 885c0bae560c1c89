"""Does a timing cache that a dense build filled hide sparse kernels from the sparse build?

    trt86/run -m device.cache RUN OUT.json

Builds RUN/sparse.onnx four times, with the options of RUN/build.json: sparse without a cache, dense
into a new cache, sparse with that cache, sparse once more with what it has become. If the cache
hides nothing, the third build lists and chooses what the first does, with tactics timed anew for
the sparse kernels. The logs stay in RUN (cache-1-sparse.log and so on); the counts go to OUT.json.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from twofour.engines.protocol import BuildRequest, no_progress
from twofour.engines.tensorrt.engine import TensorRtEngine
from twofour.inputs.fits import stored_arrays
from twofour.logs.read import read_build_log
from twofour.pipeline.folder import BUILD, INPUTS, SPARSE, onnx_name
from twofour.records.options import Variant
from twofour.records.run import BuildResult
from twofour.store import read_record, to_json, write_text

Row = dict[str, Any]


def main(run: Path, target: Path) -> None:
    cache = run / "cache.timings"
    cache.unlink(missing_ok=True)
    builds = ((1, True, None), (2, False, cache), (3, True, cache), (4, True, cache))
    rows = []
    for number, sparse, timings in builds:
        stem = f"cache-{number}-{'sparse' if sparse else 'dense'}"
        rows.append(_built(run, stem, timings, sparse=sparse))
        write_text(target, to_json({"run": run.name, "builds": rows}))


def _built(run: Path, stem: str, timings: Path | None, *, sparse: bool) -> Row:
    request = BuildRequest(
        variant=Variant.SPARSE if sparse else Variant.DENSE,
        onnx=run / onnx_name(SPARSE),
        folder=run,
        sparse_weights=sparse,
        options=read_record(BuildResult, run / BUILD).options,
        inputs=stored_arrays(run / INPUTS),
        timing_cache=timings,
        stem=stem,
    )
    started = time.perf_counter()
    try:
        TensorRtEngine().build(request, no_progress)
        error = None
    except Exception as reason:  # noqa: BLE001  # the other builds are wanted all the same
        error = repr(reason)[:300]
    seconds = round(time.perf_counter() - started, 1)
    row: Row = {"build": stem, "sparse": sparse, "cache": timings is not None}
    return row | {"seconds": seconds, "error": error} | _counts(request.file(".log"))


def _counts(log: Path) -> Row:
    if not log.is_file():
        return {}
    builds = read_build_log(log).builds
    tactics = [t for build in builds for layer in build.layers for t in layer.tactics]
    return {
        "eligible": [build.eligible for build in builds],
        "chosen": [build.chosen for build in builds],
        "tactics_timed": len(tactics),
        "sparse_tactics_timed": sum(tactic.sparse is True for tactic in tactics),
        "answered_by_cache": [build.timing_cache.hides_timings for build in builds],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
