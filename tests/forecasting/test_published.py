"""The counts of published engines in an answer are those of the table of published gains."""

from __future__ import annotations

import published_gains

from twofour.forecasting.expected import verdict_of
from twofour.forecasting.model_forecast import PUBLISHED
from twofour.records.forecast import WORTH, Worth

NONE_OR_ONE = 1
"""Published engines below the least bound: too few to say a share of them."""


def test_an_answer_counts_the_engines_of_the_table_by_their_bound() -> None:
    gains: dict[Worth, list[float]] = {verdict: [] for verdict in Worth}
    for engine in published_gains.published():
        if engine.version >= published_gains.REPAIRED:
            gains[verdict_of(engine.at_most)].append(engine.gain)
    assert len(gains.pop(Worth.NO)) <= NONE_OR_ONE
    assert {
        verdict: (len(all_of_it), sum(gain > WORTH for gain in all_of_it))
        for verdict, all_of_it in gains.items()
    } == {verdict: counts[:2] for verdict, counts in PUBLISHED.items()}
