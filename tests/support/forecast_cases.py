"""A layer of a forecast, for the tests of what is made of it."""

from __future__ import annotations

from dataclasses import replace

from twofour.records.forecast import Basis, LayerForecast

LAYER = LayerForecast(
    gpu="A100",
    precision="FP16",
    dense_low_us=90.0,
    dense_high_us=110.0,
    layer="fc",
    op="MatMul",
    rows=64,
    outputs=512,
    reduction=512,
    count=1,
    dense_us=100.0,
    sparse_us=50.0,
    gain=2.0,
    low=1.6,
    high=2.5,
    basis=Basis.MEASURED,
    reason="",
    can_run_sparse=True,
)
LOSING = replace(LAYER, rows=1, sparse_us=125.0, gain=0.8, low=0.5, high=1.25)
DENSE = replace(LAYER, can_run_sparse=False)
