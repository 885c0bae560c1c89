"""Where support for 2:4 is missing or ended: since when, who says so, and whom it concerns."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from twofour.eligibility.build_facts import BuildFacts, Typing, typing_of, version_numbers
from twofour.records.export import WITHOUT_SPARSE_INT8, Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """What a GPU, a version or a program does not run."""

    what: str
    since: str
    """Day or month of the release or the change that says it."""
    source: str

    @property
    def reference(self) -> str:
        """The date and the source."""
        return f"{self.since}, {self.source}"

    @property
    def in_words(self) -> str:
        """The fact with its date and its source."""
        return f"{self.what} ({self.reference})"


NO_SPARSE_INT8 = Support(
    what="NVIDIA's sparse library has no int8 kernels for compute capability 10.3",
    since="2026-09-30",
    source="cuSPARSELt 0.10.0, data types: https://pypi.org/project/nvidia-cusparselt-cu13/0.10.0/",
)
QDQ_ONLY = Support(
    what="TensorRT 11 quantises by Q/DQ pairs alone: --int8, --calib and calibrators ended with "
    "TensorRT 10",
    since="2026-06-02",
    source="migration guide: https://docs.nvidia.com/deeplearning/tensorrt/11.0.0/api/migration/"
    "tensorrt-10x-to-11x.html",
)
FORCE_DEPRECATED = Support(
    what="trtexec of TensorRT 10.0 and later calls --sparsity=force deprecated",
    since="2024-04",
    source="samples/common/sampleOptions.cpp of 10.0 and later: https://github.com/NVIDIA/TensorRT",
)
_DEPRECATES_FORCE = (10, 0)
"""The first TensorRT whose trtexec warns; that of 8.6 does not."""
NO_ENGINES_OF_LLM = Support(
    what="TensorRT-LLM builds no TensorRT engines any more: trtllm-build and its --weight_sparsity "
    "are gone",
    since="2026-07-02",
    source="https://nvidia.github.io/TensorRT-LLM/legacy/tensorrt-backend-removal.html",
)
NO_SPARSE_VLLM = Support(
    what="vLLM 0.19 and later refuse compressed 2:4 checkpoints (Sparse24) and have no sparse "
    "kernels for other ones",
    since="2026-03",
    source="https://github.com/vllm-project/vllm/pull/36799",
)
LLM_RUNTIMES = {"tensorrt-llm": NO_ENGINES_OF_LLM, "vllm": NO_SPARSE_VLLM}
"""What ended, for each package by its name on PyPI."""
ROWS = (NO_SPARSE_INT8, QDQ_ONLY, FORCE_DEPRECATED, *LLM_RUNTIMES.values())


def of_machine(gpu: Gpu | None, tensorrt: str | None, packages: Container[str]) -> tuple[str, ...]:
    """What concerns a machine with this GPU, TensorRT and these packages (names of PyPI)."""
    rows = (
        (NO_SPARSE_INT8, gpu is not None and gpu.compute_capability == WITHOUT_SPARSE_INT8),
        (QDQ_ONLY, typing_of(version_numbers(tensorrt)) is Typing.STRONG),
        *((row, name in packages) for name, row in LLM_RUNTIMES.items()),
    )
    return tuple(row.in_words for row, concerns in rows if concerns)


def of_build(build: BuildFacts, *, forced: bool, has_int8: bool) -> tuple[str, ...]:
    """What concerns a build; `has_int8`: the file itself says which layers compute in int8."""
    version = version_numbers(build.tensorrt_version)
    by_calibration = "INT8" in (build.types or ()) and not has_int8
    rows = (
        (FORCE_DEPRECATED, forced and version >= _DEPRECATES_FORCE),
        (QDQ_ONLY, by_calibration and not build.is_strongly_typed),
    )
    return tuple(row.in_words for row, concerns in rows if concerns)
