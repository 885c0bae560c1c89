"""The table of GPUs agrees with itself, and a GPU is found by any usual name."""

from __future__ import annotations

import csv
from collections import Counter
from itertools import groupby
from pathlib import Path

import pytest

import twofour.forecasting.gpus as module
from twofour.errors import BadInputError
from twofour.forecasting.gpus import all_gpus, gpu_named

with Path(module.__file__).with_name("gpus.csv").open(encoding="utf-8", newline="") as table:
    ROWS = [
        {key: float(value) if key in ("fp16", "bf16", "int8", "fp8", "fp4") else value
         for key, value in row.items() if value}
        for row in csv.DictReader(line for line in table if not line.startswith("#"))
    ]  # fmt: skip
PER_SM = {
    "8.0": 2048, "8.6": 1024, "8.7": 2048, "8.9": 1024, "9.0": 4096, "10.0": 8192,
    "10.3": 8192, "11.0": 8192, "12.0": 1024, "12.1": 1024,
}  # fmt: skip
"""FP16 operations of the tensor cores of one SM in a clock, dense, by compute capability."""
SLOWED = {"A10G": 2, "L40": 2, "L20": 2, "H20": 4.27}
"""Cards sold with tensor cores at a part of the speed, which is 1 / so much."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_rates_of_a_gpu_follow_from_its_sms_and_clock_and_from_each_other(
    row: dict[str, float | str],
) -> None:
    """A rate with sparsity taken for a dense one, or a digit too many, fails here."""
    capability, name = str(row["compute_capability"]), str(row["name"])
    peak = float(row["sms"]) * PER_SM[capability] * float(row["clock_mhz"]) / 1e6
    fp16, bf16 = float(row["fp16"]), float(row["bf16"])
    assert fp16 == pytest.approx(peak / SLOWED.get(name, 1), rel=0.15)
    assert bf16 == pytest.approx(fp16 / (2 if "GeForce" in name else 1), rel=0.02)
    ultra = capability == "10.3"  # more FP4, hardly any INT8
    assert row["int8"] == (150 if ultra else pytest.approx(2 * fp16, rel=0.02))
    assert ("fp8" in row, "fp4" in row) == (
        capability == "8.9" or float(capability) >= 9,
        float(capability) >= 10,
    )
    assert row.get("fp8", 2 * bf16) == pytest.approx(2 * bf16, rel=0.02)
    assert row.get("fp4", 4 * fp16) == pytest.approx((6 if ultra else 4) * fp16, rel=0.02)
    assert 30 < float(row["bandwidth_gb_s"]) <= 8000
    assert 2 <= float(row["l2_mb"]) <= 128


def test_a_name_belongs_to_one_gpu_and_one_measured_gpu_to_a_compute_capability() -> None:
    names = Counter(module._plain(n) for gpu in all_gpus() for n in (gpu.name, *gpu.aliases))
    assert [name for name, times in names.items() if times > 1] == []
    assert {
        "{}.{}".format(*capability): {gpu.measured_as for gpu in gpus}
        for capability, gpus in groupby(all_gpus(), key=lambda gpu: gpu.compute_capability)
    } == {
        "8.0": {"A100"}, "8.6": {"RTX4090"}, "8.7": {"A100"}, "8.9": {"RTX4090"},
        "9.0": {"H100", "H100 SXM"},
        "10.0": {"B200"}, "10.3": {"B200"}, "11.0": {"B200"}, "12.0": {"RTX5080"},
        "12.1": {"GB10"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("H100", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA GH200 480GB", "GH200 96GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell Server Edition"),
        ("NVIDIA Thor", "Jetson T5000"),
        ("rtx 4090", "GeForce RTX 4090"),
        ("Orin Nano", "Jetson Orin Nano 8GB"),
        ("Orin", "Jetson AGX Orin 64GB"),  # what every Jetson Orin prints
        ("NVIDIA A800-SXM4-80GB", "A800-SXM4-80GB"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "GeForce RTX 4090 Laptop GPU"),
    ],
)
def test_a_gpu_is_found_by_what_users_type_and_tools_print(name: str, found: str) -> None:
    assert gpu_named(name).name == found


def test_a_rate_accumulates_in_fp32_as_the_measured_kernels_do() -> None:
    assert dict(gpu_named("RTX 4090").tflops) == {
        "BF16": 165.2, "FP16": 165.2, "INT8": 660.6, "FP8": 330.3,
    }  # fmt: skip
    assert dict(gpu_named("A100").tflops) == {"BF16": 312, "FP16": 312, "INT8": 624}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Orin N", "Jetson Orin Nano 4GB"),
        ("H10", "H100 PCIe"),
        ("RTX 4091 Laptop GPU", "GeForce RTX 4090 Laptop GPU"),
        ("Radeon", "`--gpu all` of `twofour forecast` has them all"),
        ("", "`--gpu all` of `twofour forecast` has them all"),
        ("A100,H100", "name one GPU; only"),
        ("all", "name one GPU; only"),
    ],
)
def test_an_unknown_gpu_is_refused_with_the_nearest_names(name: str, hint: str) -> None:
    with pytest.raises(BadInputError, match=f"unknown GPU {name!r}") as refused:
        gpu_named(name)
    assert refused.value.exit_code == 2
    assert hint in str(refused.value.hint)


@pytest.mark.parametrize(
    "name",
    [
        *("V100", "Tesla V100-SXM2-16GB", "T4", "NVIDIA T4G", "Tesla P100-PCIE-16GB", "P40", "K80"),
        *("Quadro RTX 8000", "GTX 1080 Ti", "GeForce RTX 2080 Ti", "TITAN RTX", "Xavier", "M60"),
    ],
)
def test_a_gpu_before_ampere_has_no_sparse_tensor_cores(name: str) -> None:
    with pytest.raises(BadInputError, match=f"{name} has no sparse tensor cores"):
        gpu_named(name)
