"""Ctrl-C during a comparison: the first one ends it, the next ones do not end the saving."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def first_interrupt_only(*, until_exit: bool = False) -> Iterator[None]:
    """Within, the first SIGINT raises KeyboardInterrupt and later ones are ignored.

    An impatient second Ctrl-C would otherwise hit the code that keeps what the first one left.
    With `until_exit`, for a process that ends then, they stay ignored after the block too. Outside
    of the main thread, where signals cannot be handled, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    interrupted = False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if not (interrupted and until_exit):
            signal.signal(signal.SIGINT, before)
