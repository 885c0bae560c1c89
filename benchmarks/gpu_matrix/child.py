"""The process that measures, one case at a time."""

from __future__ import annotations

import gc
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import torch

from gpu_matrix.clocks import CudaClock, HostClock
from gpu_matrix.end_to_end import model_row
from gpu_matrix.environment import clocks, environment
from gpu_matrix.kernels import kernel_row
from gpu_matrix.lab import DeviceLostError, Lab, Send, free_memory, require_device
from gpu_matrix.plan import SECTIONS, Case, KernelCase, Order
from gpu_matrix.rows import Row, attempt, first_line

Work = Callable[[Order, Send], None]


def work(order: Order, send: Send) -> None:
    """Measure the cases that are not done yet, telling `send` of each."""
    torch.set_grad_enabled(False)
    warnings.simplefilter("ignore")
    if not order.smoke and not torch.cuda.is_available():
        for index in range(len(order.plan)):
            send(("skip", index, "torch sees no CUDA device"))
        return
    lab = Lab(
        HostClock() if order.smoke else CudaClock(),
        "cpu" if order.smoke else "cuda",
        order.smoke,
        order.seed,
        send,
        order.banned,
        dict(order.uncapturable),
    )
    send(("environment", environment(lab)))
    gc.collect()
    gc.freeze()
    for index in due(order, send):
        send(("begin", index))
        send(("row", index, case_row(order.plan[index], lab)))
        free_memory()
    send(("clocks", clocks("end")))


def due(order: Order, send: Send) -> Iterator[int]:
    """Cases to begin now: by section, then what the sections' shares had no room for."""
    late, section = [], None
    for index, case in enumerate(order.plan):
        if index in order.done:
            continue
        if order.left_s(SECTIONS[case.section]) <= 0:
            late.append(index)
            continue
        if case.section != section:
            send(("clocks", clocks(f"before {case.section}")))
            section = case.section
        yield index
    for index in late:
        if order.left_s() <= 0:
            send(("skip", index, f"the budget of {order.budget_s:g} s was spent"))
        else:
            yield index


def case_row(case: Case, lab: Lab) -> Row:
    """Measure a case; what stops the whole case is its row. Raises DeviceLostError."""
    torch.manual_seed(lab.seed)
    gc.disable()  # a collection in mid-sample is an outlier, in mid-capture an error
    try:
        return kernel_row(case, lab) if isinstance(case, KernelCase) else model_row(case, lab)
    except DeviceLostError:
        raise
    except Exception as error:  # noqa: BLE001  out of memory, say: the next case may fit
        require_device(lab)
        return case.row() | {"error": first_line(error)}
    finally:
        gc.enable()


def child_main(order: Order, job: Work, sender: Connection) -> None:
    """The child: no output on stdout, its messages through `sender`."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    os.dup2(2, 1)
    try:
        job(order, sender.send)
        sender.send(("end",))
    except BaseException as error:  # noqa: BLE001  whatever it was, the parent is to know
        reason = first_line(error)
        attempt(lambda: sender.send(("lost", reason)))
        # no clean-up: with a lost context it may hang
        os._exit(1)
