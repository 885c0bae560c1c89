"""In which settings two variants differ, and whether that is more than their sparsity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from twofour.records.latency import Difference, VariantSettings

SPARSITY = frozenset({"weights", "model", "sparse_kernels"})
"""Settings in which two variants may differ and still differ in sparsity only."""
_UNKNOWN = {
    "version": "unknown",
    "sparse_kernels": "no such kernels",
    "threads": "not set",
}
"""What None says in each setting that may be None."""
_KERNELS = {True: "allowed", False: "not allowed"}


def differences_of(
    variant: VariantSettings | None, baseline: VariantSettings | None
) -> tuple[Difference, ...]:
    """In the order of the fields; of options only those that one side has; () if one is unknown."""
    return () if variant is None or baseline is None else tuple(_differences(variant, baseline))


def differ_in_sparsity_only(
    variant: VariantSettings | None, baseline: VariantSettings | None
) -> bool:
    """Whether nothing differs but weights, model and sparse kernels; False if one is unknown.

    A mode that only names which kernels are allowed (tensorrt:gpu, tensorrt:gpu-sparsity-off) is
    the same mode: the kernels differ then, and both engines have them.
    """
    if variant is None or baseline is None:
        return False
    kernels = {variant.sparse_kernels, baseline.sparse_kernels}
    same_mode = {"mode"} if kernels == {True, False} else set()
    found = {d.setting for d in _differences(variant, baseline)}
    return found <= SPARSITY | same_mode


def _differences(variant: VariantSettings, baseline: VariantSettings) -> Iterator[Difference]:
    for field in fields(VariantSettings):
        name = field.name
        ours, theirs = getattr(variant, name), getattr(baseline, name)
        if name == "options":
            ours, theirs = _without(ours, theirs), _without(theirs, ours)
        if ours != theirs:
            yield Difference(
                setting=name, variant=_words(name, ours), baseline=_words(name, theirs)
            )


def _without(options: tuple[str, ...], others: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(option for option in options if option not in others)


def _words(setting: str, value: object) -> str:
    if value is None:
        return _UNKNOWN.get(setting, "none")
    if isinstance(value, bool):
        return _KERNELS[value]
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value)
