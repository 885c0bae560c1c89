"""A file that is cut short while it is mapped into memory: a message and exit 2, not a bare SIGBUS.

Reading behind the new end is a fault of the processor, of which Python can only be told by C: the
handler is called where the fault is, and does nothing but write and leave.
"""

from __future__ import annotations

import ctypes
import os
import signal
from functools import cache

from twofour.errors import BadInputError

_SAID = (
    b"error: a file was cut short while it was read, or its disk no longer gives it (SIGBUS)\n"
    b"hint: wait until what writes it is done; the same command goes on from here\n"
)


@cache
def tell_of_files_cut_short() -> object:
    """From now on, in this process; gives what has to live as long as it."""
    number = getattr(signal, "SIGBUS", None)
    if number is None:  # Windows has exceptions of its own
        return None
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(_leave)
    install = ctypes.CDLL(None).signal
    install.argtypes, install.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    install(int(number), ctypes.cast(handler, ctypes.c_void_p))
    return handler


def _leave(_number: int) -> None:
    os.write(2, _SAID)
    os._exit(BadInputError.exit_code)
