"""Calibration data from the user's code: a function, or a loader, that yields batches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from twofour.pipeline.sources.calibration.data import CalibrationData
from twofour.pipeline.sources.calibration.request import Request
from twofour.pipeline.sources.calibration.values import calibration_from_value
from twofour.pipeline.sources.seeding import seed_everything
from twofour.pipeline.sources.source import key_of
from twofour.pipeline.sources.user_code import (
    CodeReference,
    call,
    files_read,
    import_attribute,
    parse_reference,
    reference_key,
    user_code,
)


def open_code(request: Request) -> CalibrationData:
    """Call the function and keep what it yields, with all random numbers seeded.

    Their key is then that of the values, which tells other data of the same code apart.
    Raises BadInputError for code that fails, wants arguments, or yields no batches of the model.
    """
    reference = parse_reference(request.text)
    with files_read() as watched:
        seed_everything(request.seed)
        data = calibration_from_value(
            _called(reference, request.seed),
            request.inputs,
            samples=request.options.samples,
            where=request.text,
            guard=partial(user_code, reference, "raised"),
        )
    return replace(data, watched=tuple(watched))


def code_key(request: Request) -> str:
    """Of the code and the seed; the files that it reads are not seen."""
    reference = parse_reference(request.text)
    return key_of(reference_key(reference), request.settings, str(request.seed))


def _called(reference: CodeReference, seed: int) -> object:
    target = import_attribute(reference)
    if not callable(target):  # a loader of that name
        return target
    return call(reference, target, seed, hint="name a function that takes none and yields batches")
