"""Every error a user can meet, each with its exit code.

TwofourError is the root. BadInputError (2): a file, option or model that cannot be used as it is.
MissingToolError (3): a package or tool is not installed; the hint names what to install.
PatternBrokenError (4): a pattern does not hold, or a gate is not met. BuildFailedError (5): no
engine came out of a build. Anything else that escapes is a bug of twofour (1). NOT_JUDGED (6) is
not an error of the run: what was measured does not decide a gate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

NOT_JUDGED = 6
INTERRUPTED = 130


class TwofourError(Exception):
    """What went wrong, where, the value found, and (as `hint`) what to do about it."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        if self.hint is None:
            return self.message
        return f"{self.message}\nhint: {self.hint}"


def first_line(error: BaseException) -> str:
    """First line of the message, behind which libraries put source locations; else the type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class BadInputError(TwofourError):
    """Input that cannot be used: missing, damaged, inconsistent or unsafe."""

    exit_code = 2


@contextmanager
def naming(what: object) -> Iterator[None]:
    """Put the name of a file or layer before the message of an error that does not have it."""
    try:
        yield
    except (BadInputError, PatternBrokenError) as error:
        if what is None or str(what) in error.message:
            raise
        kind = BadInputError if isinstance(error, BadInputError) else PatternBrokenError
        raise kind(f"{what}: {error.message}", hint=error.hint) from error


@contextmanager
def system_errors(problem: str, hint: str | None = None) -> Iterator[None]:
    """Raise BadInputError with the problem and its cause where the file system refuses."""
    try:
        yield
    except OSError as error:
        raise BadInputError(f"{problem}: {error.strerror or error}", hint=hint) from error


class MissingToolError(TwofourError):
    """A package or tool that the request needs and this machine lacks."""

    exit_code = 3


class PatternBrokenError(TwofourError):
    """A weight that was to be N:M is not, or a gate is not met."""

    exit_code = 4


class BuildFailedError(TwofourError):
    """An engine build that ended without an engine."""

    exit_code = 5
