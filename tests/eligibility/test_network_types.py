from __future__ import annotations

import pytest

from twofour.eligibility.findings import BuildFacts
from twofour.eligibility.network_types import Typing, typing_of
from twofour.engines.trtexec import RELEASES


@pytest.mark.parametrize(
    ("version", "typing"),
    [
        ((), None),
        ((8, 6, 1), Typing.WEAK),
        ((9, 2), Typing.WEAK),
        ((10, 16), Typing.STRONG_BY_FLAG),
        ((11, 0, 0), Typing.STRONG),
    ],
)
def test_a_version_says_where_its_builder_takes_types_from(
    version: tuple[int, ...], typing: Typing | None
) -> None:
    assert typing_of(version) is typing


def test_reports_and_trtexec_go_by_the_same_table() -> None:
    for releases in RELEASES:
        build = BuildFacts(tensorrt_version=f"{releases.major}.{releases.first_minor}.0")
        assert build.is_strongly_typed is (releases.typing is Typing.STRONG)
