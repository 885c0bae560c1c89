"""How data is kept: in dataclasses that do not change and whose fields are given by name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform  # in typing from Python 3.11 on

    @dataclass_transform(frozen_default=True, kw_only_default=True)
    def frozen(kind: object = None, /, *, repr: bool = True, eq: bool = True) -> Any:  # noqa: A002, ANN401  # those of dataclass
        """A dataclass that is frozen, has slots, and takes its fields by keyword alone."""
else:
    frozen = partial(dataclass, frozen=True, slots=True, kw_only=True)
