"""`--shapes`: what it says, whether the model allows it, and the shapes where it is silent."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from twofour.engines.protocol import Arrays
from twofour.errors import BadInputError
from twofour.records import ShapeProfile, TensorShape

_SHAPE = re.compile(r"\d{1,10}(?:x\d{1,10})*")
_LARGEST_DIM = 2**31 - 1
_HINT = "write it like input=1x3x224x224:8x3x224x224:16x3x224x224 (min:opt:max), or one shape"


def parse_shapes(texts: Sequence[str]) -> tuple[ShapeProfile, ...]:
    """Read `name=min:opt:max` or `name=shape`, several of them separated by commas as in trtexec.

    Raises BadInputError for anything else, a name given twice, and min > opt or opt > max.
    """
    profiles: dict[str, ShapeProfile] = {}
    for item in (part for text in texts for part in text.split(",")):
        profile = _parse_one(item.strip())
        if profile.input in profiles:
            raise BadInputError(f"--shapes names input {profile.input!r} twice")
        profiles[profile.input] = profile
    return tuple(profiles.values())


def _parse_one(item: str) -> ShapeProfile:
    name, equals, text = item.rpartition("=")
    shapes = text.split(":")
    name = name.strip().strip("'\"")
    if not (equals and name and len(shapes) in {1, 3}) or not all(map(_SHAPE.fullmatch, shapes)):
        raise BadInputError(f"--shapes: cannot read {item!r}", hint=_HINT)
    parsed = [tuple(int(dim) for dim in shape.split("x")) for shape in shapes]
    if any(not 1 <= dim <= _LARGEST_DIM for shape in parsed for dim in shape):
        raise BadInputError(f"--shapes: a dimension of {item!r} is not in 1..{_LARGEST_DIM}")
    smallest, usual, largest = parsed * 3 if len(parsed) == 1 else parsed
    profile = ShapeProfile(input=name, min=smallest, opt=usual, max=largest)
    _check_order(profile)
    return profile


def _check_order(profile: ShapeProfile) -> None:
    ranks = {len(profile.min), len(profile.opt), len(profile.max)}
    if len(ranks) > 1:
        raise BadInputError(
            f"--shapes: min, opt and max of {profile.input!r} have different ranks", hint=_HINT
        )
    rows = zip(profile.min, profile.opt, profile.max, strict=True)
    for axis, (smallest, usual, largest) in enumerate(rows):
        if not smallest <= usual <= largest:
            raise BadInputError(
                f"--shapes: dimension {axis} of {profile.input!r} has min {smallest}, opt {usual}, "
                f"max {largest}",
                hint="min <= opt <= max must hold for every dimension",
            )


def check_shapes(profiles: Sequence[ShapeProfile], inputs: Sequence[TensorShape]) -> None:
    """Raises BadInputError for an unknown input, another rank or a changed fixed dimension."""
    known = {tensor.name: tensor for tensor in inputs}
    for profile in profiles:
        if profile.input not in known:
            raise BadInputError(
                f"--shapes: the model has no input {profile.input!r}",
                hint=f"its inputs are {', '.join(map(_describe, inputs)) or 'none'}",
            )
        _check_fits(profile, known[profile.input])


def _check_fits(profile: ShapeProfile, tensor: TensorShape) -> None:
    if len(profile.opt) != len(tensor.shape):
        raise BadInputError(
            f"--shapes: {profile.input!r} is given {len(profile.opt)} dimensions, "
            f"the model has {_describe(tensor)}"
        )
    for axis, fixed in enumerate(tensor.shape):
        asked = {profile.min[axis], profile.opt[axis], profile.max[axis]}
        if isinstance(fixed, int) and asked != {fixed}:
            raise BadInputError(
                f"--shapes: dimension {axis} of {profile.input!r} is fixed to {fixed}, "
                f"found {profile.min[axis]}:{profile.opt[axis]}:{profile.max[axis]}",
                hint=f"the model has {_describe(tensor)}",
            )


def profiles_for(
    asked: Sequence[ShapeProfile], inputs: Sequence[TensorShape], examples: Arrays
) -> tuple[ShapeProfile, ...]:
    """One profile for each input with a dynamic dimension: as asked for, else from its example.

    From an example: a dynamic first dimension (the batch) goes from 1 to the example's, every other
    dimension stays as in the example, because a model rarely accepts 1 for those. The example is
    opt and max: tactics are chosen for opt. Raises BadInputError where neither is there, and where
    `asked` does not fit the model.
    """
    check_shapes(asked, inputs)
    given = {profile.input: profile for profile in asked}
    return tuple(
        given.get(tensor.name) or _from_example(tensor, examples)
        for tensor in inputs
        if tensor.name in given or any(not isinstance(dim, int) for dim in tensor.shape)
    )


def _from_example(tensor: TensorShape, examples: Arrays) -> ShapeProfile:
    if tensor.name not in examples:
        raise BadInputError(
            f"input {_describe(tensor)} has a dynamic shape and no example",
            hint=f"give its shapes with --shapes {tensor.name}=min:opt:max",
        )
    shape = tuple(examples[tensor.name].shape)
    dynamic_batch = bool(shape) and not isinstance(tensor.shape[0], int)
    smallest = (1, *shape[1:]) if dynamic_batch else shape
    profile = ShapeProfile(input=tensor.name, min=smallest, opt=shape, max=shape)
    _check_fits(profile, tensor)
    return profile


def opt_shapes(profiles: Sequence[ShapeProfile]) -> Mapping[str, tuple[int, ...]]:
    """Input name -> the shape its runs are timed at."""
    return {profile.input: profile.opt for profile in profiles}


def _describe(tensor: TensorShape) -> str:
    return f"{tensor.name} ({' x '.join(map(str, tensor.shape)) or 'scalar'})"
