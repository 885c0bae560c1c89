"""NVIDIA GPUs by the figures of their data sheets (gpus.csv), found by any usual name.

FP16 rates are those with FP32 accumulation, as cuBLASLt and cuSPARSELt compute: a GeForce RTX 4090
was measured at 168 TFLOPS at most, and its tensor peak with FP16 accumulation is 330.
"""

from __future__ import annotations

import csv
import re
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path

from twofour.errors import BadInputError
from twofour.records.forecast import GpuKind

_RATES = {"BF16": "bf16", "FP16": "bf16", "INT8": "int8", "FP8": "fp8", "FP4": "fp4"}
"""Precision -> the column with its rate."""
_OLDER = re.compile(
    r"(tesla)?[vpkmt]\d+.*|quadro.*|gtx.*|(rtx)?20[5678]0.*|titan.*"
    r"|(jetson)?(agx)?(xavier.*|nano|tx[12])"
)
"""Plain names of GPUs before Ampere."""


def gpu_named(name: str) -> GpuKind:
    """The GPU of a name such as "a100", "rtx 4090", "NVIDIA A100-SXM4-80GB" or "Orin Nano".

    Case, spaces, hyphens, "NVIDIA" and "GeForce" do not matter. A name that several GPUs share
    finds the one with measured kernel times, if any, and "Orin" the largest. Raises BadInputError
    with the nearest names, and for GPUs before Ampere.
    """
    known = _by_name()
    wanted = _plain(name)
    if wanted in known:
        return known[wanted]
    if is_older(name):
        message = f"{name} has no sparse tensor cores"
        raise BadInputError(message, hint="name a GPU from Ampere on, such as A100 or RTX 3060")
    near = [key for key in known if wanted and wanted in key]
    near = near or get_close_matches(wanted, known, n=5, cutoff=0.5)
    hint = "`--gpu all` of `twofour forecast` has them all"
    if near:
        names = ", ".join(dict.fromkeys(known[key].name for key in near))
        hint = f"the nearest names are {names}"
    if "," in name or wanted == "all":
        hint = "name one GPU; only `twofour forecast` takes several"
    raise BadInputError(f"unknown GPU {name!r}", hint=hint)


def is_older(name: str) -> bool:
    """Whether a GPU of this name is from before Ampere, and so has no sparse tensor cores."""
    wanted = _plain(name)
    return wanted not in _by_name() and _OLDER.fullmatch(wanted) is not None


@lru_cache(maxsize=1)
def all_gpus() -> tuple[GpuKind, ...]:
    """Every GPU of the table, by compute capability."""
    return tuple(map(_gpu, table_rows("gpus.csv")))


def table_rows(name: str) -> list[dict[str, str]]:
    """The rows of a table beside this module, by the heads of their columns."""
    with Path(__file__).with_name(name).open(encoding="utf-8", newline="") as file:
        lines = (line for line in file if not line.startswith("#"))
        return list(csv.DictReader(lines))


@lru_cache(maxsize=1)
def _by_name() -> dict[str, GpuKind]:
    known = {}
    for gpu in all_gpus():
        known.update({_plain(name): gpu for name in (gpu.name, *gpu.aliases)})
    return known


def _plain(name: str) -> str:
    # "NVIDIA GeForce RTX 4090" is rtx4090
    return re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())


def _gpu(row: dict[str, str]) -> GpuKind:
    major, minor = row["compute_capability"].split(".")
    return GpuKind(
        name=row["name"],
        aliases=tuple(filter(None, row["aliases"].split(";"))),
        compute_capability=(int(major), int(minor)),
        sms=int(row["sms"]),
        bandwidth_gb_s=float(row["bandwidth_gb_s"]),
        l2_mb=float(row["l2_mb"]),
        tflops=tuple((name, float(row[key])) for name, key in _RATES.items() if row[key]),
        measured_as=row["measured_as"],
    )
