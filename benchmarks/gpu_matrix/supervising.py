"""The process that keeps the budget and replaces a child that is lost."""

from __future__ import annotations

import multiprocessing
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

from gpu_matrix.child import Work, child_main
from gpu_matrix.report import ChildState, Report

FIRST_WORD_S = 150.0
"""Patience with a child that says nothing: CUDA starts slowly on a machine just started."""
STALL_S = 60.0
SILENT = "nothing was heard"
RESTARTS = 8
GRACE_S = 20.0
"""Beyond the budget, for the case in hand."""


def supervise(report: Report, job: Work) -> None:
    """Run the plan to its end in children, one after another where one is lost."""
    blamed: Counter[str | None] = Counter()
    lost: Counter[int] = Counter()
    reason: str | None = None
    for _ in range(RESTARTS + 1):
        state = ChildState()
        reason = one_child(report, job, state)
        if reason is None:
            return
        report.data["restarts"].append({"reason": reason} | asdict(state))
        # a hang costs a minute, a lost process seconds: the one is not tried twice
        blamed[state.variant] += 2 if reason.startswith(SILENT) else 1
        if state.case is not None:
            lost[state.case] += 1
            if lost[state.case] == 3:
                row = report.order.plan[state.case].row()
                report.settle(state.case, row | {"error": f"three processes lost: {reason}"})
        banned = frozenset(name for name, times in blamed.items() if name and times > 1)
        report.order = replace(report.order, banned=banned)
        if report.order.left_s() <= -GRACE_S:
            break
    skip_rest(report, f"not reached: {reason}")


def skip_rest(report: Report, reason: str) -> None:
    for index in range(len(report.order.plan)):
        if index not in report.order.done:
            report.take(("skip", index, reason), ChildState())


def one_child(report: Report, job: Work, state: ChildState) -> str | None:
    """Listen to one child until it ends; why it ended before its work did, or None."""
    methods = multiprocessing.get_all_start_methods()
    # a fork saves the second import of torch, half a minute on a cold disk
    context = multiprocessing.get_context("fork" if "fork" in methods else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    child: Any = context.Process(  # type: ignore[attr-defined]  # typeshed: not on the base
        target=child_main, args=(report.order, job, sender), daemon=True
    )
    child.start()
    sender.close()
    try:
        return listen(report, receiver, state)
    finally:
        child.kill()
        child.join(10)


def listen(report: Report, receiver: Connection, state: ChildState) -> str | None:
    """Take the child's messages; None after its last one, else why there are no more."""
    patience = FIRST_WORD_S
    while True:
        wait = min(patience, report.order.left_s() + GRACE_S)
        if wait <= 0 or not receiver.poll(wait):
            spent = report.order.left_s() <= -GRACE_S
            return "the budget was spent" if spent else f"{SILENT} for {patience:g} s"
        try:
            message = receiver.recv()
        except (EOFError, OSError):
            return "the process died"
        if message[0] == "end":
            return None
        if message[0] == "lost":
            return str(message[1])
        report.take(message, state)
        patience = STALL_S


class Interrupted(BaseException):
    """A signal asked for the end."""


@contextmanager
def signals_end_it() -> Iterator[None]:
    """SIGTERM and Ctrl-C raise Interrupted inside, and do nothing more once it is over."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise Interrupted(f"interrupted by {signal.Signals(number).name}")

    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
