"""A folder to build elsewhere: the ONNX file, a build.sh around trtexec, and what comes back."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from twofour.eligibility.build_facts import DEPRECATED, Typing
from twofour.engines.inputs import (
    beyond_ranges,
    bind_shapes,
    is_fixed,
    profiles_for,
    shapes_of,
)
from twofour.engines.tensorrt.build import Precisions, opset_advice, precisions_of
from twofour.engines.trtexec import (
    ONNX,
    Releases,
    TrtexecScript,
    releases_of,
    script_text,
    trtexec_script,
)
from twofour.errors import BadInputError
from twofour.graph.opened import OpenedModel, open_onnx
from twofour.pipeline.folder import alone_in, is_run_folder
from twofour.pipeline.onnx_inputs import asked_or_opt, example_shapes, load_inputs
from twofour.pipeline.onnx_stages import write_onnx
from twofour.pipeline.stages import INPUTS, LAYERS
from twofour.pruning.onnx_file import data_copies
from twofour.records.build import TrtexecFolder, TrtexecRounds, TrtexecVariant
from twofour.records.export import LayerMap, TensorShape
from twofour.records.options import AllowedType, RunOptions, ShapeProfile, SizeRange
from twofour.store import read_record, write_record, write_text
from twofour.version import __version__

EMITTED = "emitted.json"
FAILED = "failed.txt"
"""Names of the variants that trtexec failed for, written by build.sh."""
SCRIPT = "build.sh"
README = "README.txt"

UNFINISHED = ".unfinished"
"""In the folder while it is filled: of a process that was killed the rest may be thrown away."""
_HALF_WRITTEN = re.compile(r"\..+\.[^.]+\.part")

_EXECUTABLE = 0o111


def emit_trtexec(onnx: Path, folder: Path, options: RunOptions, version: str) -> TrtexecFolder:
    """Fill a new or empty folder with all that a machine with trtexec of `version` needs.

    One that was killed before its end left can be filled again.

    Raises BadInputError for a file that is no ONNX model, a folder that holds something, a version
    without a script, and a dynamic shape that is not given; nothing is left in the folder then.
    """
    releases = releases_of(version)
    if onnx.suffix != ".onnx":
        raise BadInputError(f"{onnx} is not an .onnx file", hint="export the model first")
    model = open_onnx(onnx)
    inputs, ranges = model.inputs, model.size_ranges
    build = replace(options.build, shapes=_profiles(onnx, options, inputs, ranges))
    with _fresh_folder(folder, _names(model, folder)):
        converted = write_onnx(model, folder / ONNX, options)
        precisions = precisions_of(open_onnx(folder / ONNX).proto)
        script = trtexec_script(releases, build, precisions)
        emitted = TrtexecFolder(
            source=str(onnx),
            twofour_version=__version__,
            tensorrt=str(releases),
            onnx=ONNX,
            script=SCRIPT,
            layer_map=_take_layer_map(onnx, folder),
            options=build,
            variants=script.variants,
            rounds=script.rounds,
            notes=(
                *(() if converted is None else converted.notes),
                *filter(None, [opset_advice(str(releases), model.opset)]),
                *beyond_ranges(options.build.shapes, inputs, ranges),
                *_about_types(releases, options, precisions),
            ),
        )
        _write(folder, script, emitted)
    return emitted


def _about_types(releases: Releases, options: RunOptions, precisions: Precisions) -> Iterator[str]:
    """What --fp16, --int8 and --bf16 mean for these releases."""
    allow = options.build.allow
    if allow and releases.typing is not Typing.WEAK:
        yield DEPRECATED
    if AllowedType.INT8 in allow and not precisions.int8:
        yield (
            "the file has no Q/DQ nodes: with --int8 trtexec makes ranges up, and what the engine "
            "puts out is of no use; its times and tactics are those of INT8"
        )


def is_emitted_folder(path: Path) -> bool:
    """Whether a folder was made by `emit_trtexec`, built in or not."""
    return (path / EMITTED).is_file()


def read_emitted(folder: Path) -> TrtexecFolder:
    """The record of an emitted folder that came back with at least the log of the sparse engine.

    Every other file that it names may be missing: a build can fail, and a plan is large.
    """
    emitted = read_record(TrtexecFolder, folder / EMITTED)
    for variant in emitted.variants:
        if variant.sparse_weights and not (folder / variant.log).is_file():
            raise BadInputError(
                f"{folder} holds no {variant.log}: nothing was built in it yet",
                hint=f"run {emitted.script} in it on a machine with TensorRT {emitted.tensorrt}, "
                "and copy the folder back",
            )
    return emitted


def failed_variants(folder: Path) -> tuple[str, ...]:
    """The variants that build.sh could not build in its last run; () where all were built."""
    path = folder / FAILED
    return (
        tuple(path.read_text(encoding="utf-8", errors="replace").split()) if path.is_file() else ()
    )


def _profiles(
    onnx: Path,
    options: RunOptions,
    inputs: Sequence[TensorShape],
    ranges: Mapping[str, SizeRange],
) -> tuple[ShapeProfile, ...]:
    """As a build here has them: --shapes, the example inputs, and what follows from both."""
    asked = bind_shapes(options.build.shapes, inputs)
    open_still = {t.name for t in inputs if not is_fixed(t)} - {p.input for p in asked}
    examples = _example_shapes(onnx, options, inputs) if open_still else {}
    return profiles_for(asked, inputs, examples, ranges)


def _example_shapes(
    onnx: Path, options: RunOptions, inputs: Sequence[TensorShape]
) -> Mapping[str, tuple[int, ...]]:
    """Of --inputs or --input-shape; else of the run that the file is from; else made up."""
    if options.inputs is not None:
        return shapes_of(load_inputs(Path(options.inputs), tuple(inputs)))
    own = onnx.parent / INPUTS
    if not options.input_shapes and is_run_folder(onnx.parent) and own.is_file():
        return shapes_of(load_inputs(own, tuple(inputs)))
    return example_shapes(inputs, asked_or_opt(options, options.build.shapes), str(onnx))


def _names(model: OpenedModel, folder: Path) -> frozenset[str]:
    """All that is written into the folder."""
    data = {f"{ONNX}.data", *(path.name for path in data_copies(model, folder / ONNX).values())}
    return frozenset({ONNX, *data, SCRIPT, README, LAYERS, EMITTED, UNFINISHED})


@contextlib.contextmanager
def _fresh_folder(folder: Path, names: frozenset[str]) -> Iterator[None]:
    """A new or empty folder, empty again where writing fails; UNFINISHED is in it until the end."""
    with contextlib.ExitStack() as lock:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.enter_context(alone_in(folder))
            found = _emptied(folder, names)
        except OSError as error:
            raise BadInputError(f"cannot use {folder}: {error.strerror or error}") from error
        if found is not None:
            raise BadInputError(
                f"{folder} is not empty (it holds {found!r})",
                hint="name a new folder; nothing in this one was touched",
            )
        try:
            yield
            (folder / UNFINISHED).unlink()
        except BaseException:
            _remove(folder, names)
            raise


def _emptied(folder: Path, names: frozenset[str]) -> str | None:
    """What is in it of the user's; without that it is empty then, but for the mark."""
    again = (folder / UNFINISHED).is_file()
    others = (e.name for e in folder.iterdir() if not (again and _is_ours(e, names)))
    found = next(others, None)
    if found is None:
        _remove(folder, names)
        (folder / UNFINISHED).touch()
    return found


def _remove(folder: Path, names: frozenset[str]) -> None:
    """What was written here, or half so; the mark goes last, and all else is the user's."""
    ours = [entry for entry in folder.iterdir() if _is_ours(entry, names)]
    for entry in sorted(ours, key=lambda entry: entry.name == UNFINISHED):
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _is_ours(entry: Path, names: frozenset[str]) -> bool:
    if _HALF_WRITTEN.fullmatch(entry.name):
        return not entry.is_symlink()
    return entry.name in names and not entry.is_dir()


def _write(folder: Path, script: TrtexecScript, emitted: TrtexecFolder) -> None:
    """The record comes last: it is what makes the folder one of ours."""
    write_text(folder / SCRIPT, script_text(script))
    (folder / SCRIPT).chmod((folder / SCRIPT).stat().st_mode | _EXECUTABLE)
    write_text(folder / README, _readme(emitted))
    write_record(folder / EMITTED, emitted)


def _take_layer_map(onnx: Path, folder: Path) -> str | None:
    """Names of modules, where the model lies in a run folder that knows them."""
    layers = onnx.parent / LAYERS
    if not is_run_folder(onnx.parent) or not layers.is_file():
        return None
    read_record(LayerMap, layers)
    shutil.copyfile(layers, folder / LAYERS)
    return LAYERS


def _readme(emitted: TrtexecFolder) -> str:
    lines = [
        f"A sparse and a dense TensorRT engine from {emitted.onnx}, to be built where trtexec is.",
        "",
        f"1. Copy this folder to a machine with TensorRT {emitted.tensorrt} and the GPU to run on.",
        f"2. There: sh {emitted.script}",
        "3. Copy the folder back (the .plan files and timing.cache may stay).",
        "4. Here: twofour report FOLDER",
        "         twofour compare FOLDER",
        "",
        f"Both commands stand in {emitted.script}; they differ in --sparsity and in file names.",
        "Each engine leaves:",
        *(f"  {variant.variant}: {_left_by(variant)}" for variant in emitted.variants),
        *_about_rounds(emitted.rounds),
        "",
        "Shapes (min, opt, max; timed at opt):",
        *(_shape_line(profile) for profile in emitted.options.shapes),
        *(["  fixed by the model"] if not emitted.options.shapes else []),
        *(f"\nNote: {note}" for note in emitted.notes),
    ]
    return "\n".join(lines) + "\n"


def _about_rounds(rounds: TrtexecRounds | None) -> list[str]:
    if rounds is None:
        return []
    return [
        f"Then {rounds.rounds} rounds time {', '.join(rounds.engines)}, in changing order "
        "(ROUNDS=n is another number):",
        f"  {rounds.folder}/ENGINE.ROUND.json and .log",
    ]


def _left_by(variant: TrtexecVariant) -> str:
    files = (variant.plan, variant.log, variant.layers, variant.profile, variant.times)
    return ", ".join(file for file in files if file is not None)


def _shape_line(profile: ShapeProfile) -> str:
    shapes = (profile.min, profile.opt, profile.max)
    return f"  {profile.input}: " + ", ".join("x".join(map(str, shape)) for shape in shapes)
