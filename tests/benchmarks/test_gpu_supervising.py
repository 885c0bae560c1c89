"""Children of the GPU benchmark that get lost: no case is, and the reason is said."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

from gpu_matrix.lab import DeviceLostError, Send
from gpu_matrix.plan import Order, smoke_plan
from gpu_matrix.report import Report
from gpu_matrix.supervising import GRACE_S, RESTARTS, supervise


def send_row(order: Order, send: Send, index: int) -> None:
    send(("row", index, order.plan[index].row() | {"variants": []}))


def one_bad_variant(order: Order, send: Send) -> None:
    for index in range(len(order.plan)):
        if index in order.done:
            continue
        send(("begin", index))
        send(("try", "bad"))
        if index == 1 and "bad" not in order.banned:
            os._exit(9)
        send_row(order, send, index)


def one_bad_case(order: Order, send: Send) -> None:
    for index in range(len(order.plan)):
        if index in order.done:
            continue
        send(("begin", index))
        if index == 1:
            raise DeviceLostError("an illegal memory access")
        send_row(order, send, index)


def always_dying(_order: Order, _send: Send) -> None:
    os._exit(9)


def small_report() -> Report:
    data: dict[str, list[Any]] = {
        key: [] for key in ("kernels", "models", "skipped", "restarts", "clocks")
    }
    order = Order(smoke_plan()[:4], 60.0, time.monotonic(), 0, True)
    return Report(data, None, order)


def test_a_variant_that_takes_the_process_twice_is_banned_and_no_case_is_lost() -> None:
    report = small_report()
    supervise(report, one_bad_variant)
    assert [lost["reason"] for lost in report.data["restarts"]] == ["the process died"] * 2
    assert report.order.banned == {"bad"}
    assert [row["dtype"] for row in report.data["kernels"]] == [
        case.dtype for case in report.order.plan
    ]
    assert all("error" not in row for row in report.data["kernels"])


def test_a_case_that_takes_three_processes_is_a_row_with_the_reason() -> None:
    report = small_report()
    supervise(report, one_bad_case)
    errors = [row.get("error") for row in report.data["kernels"]]
    reason = "three processes lost: DeviceLostError: an illegal memory access"
    assert errors == [None, reason, None, None]


def test_when_no_process_lives_every_case_is_skipped_with_the_reason() -> None:
    report = small_report()
    supervise(report, always_dying)
    assert {case["reason"] for case in report.data["skipped"]} == {"not reached: the process died"}
    assert len(report.data["skipped"]) == 4
    assert len(report.data["restarts"]) == RESTARTS + 1


def test_a_silent_child_is_given_up_when_the_budget_is_spent() -> None:
    report = small_report()
    report.order = replace(report.order, budget_s=1.0 - GRACE_S)
    started = time.monotonic()
    supervise(report, lambda _order, _send: time.sleep(60))
    assert time.monotonic() - started < 20
    assert {case["reason"] for case in report.data["skipped"]} == {
        "not reached: the budget was spent"
    }
