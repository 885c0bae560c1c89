"""The layers' times over several profiles."""

from __future__ import annotations

from twofour.comparing.measure import middle_profile
from twofour.records.export import LayerTime


def profile(**ms: float) -> tuple[LayerTime, ...]:
    return tuple(LayerTime(name=name, mean_ms=value) for name, value in ms.items())


def test_a_layer_has_its_median_over_the_profiles_and_one_slow_profile_counts_for_nothing() -> None:
    found = middle_profile(
        [profile(conv=1.0, head=0.2), profile(conv=9.0, head=0.1), profile(conv=1.1, head=0.3)]
    )
    assert found == profile(conv=1.1, head=0.2)


def test_what_is_not_in_every_profile_is_left_out() -> None:
    assert middle_profile([profile(conv=1.0, head=0.2), profile(conv=2.0)]) == profile(conv=1.5)


def test_without_profiles_there_are_no_layers() -> None:
    assert middle_profile([]) == ()
    assert middle_profile([(), (), ()]) == ()
