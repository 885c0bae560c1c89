"""What is compared: a run folder, or ONNX files and engines, brought to one form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from twofour.engines.inputs import parse_shapes, profiles_for, shapes_of
from twofour.engines.registry import ENGINES, Takes
from twofour.engines.tensorrt.build import precisions_of
from twofour.errors import BadInputError
from twofour.graph.opened import OpenedModel, open_onnx
from twofour.pipeline.changed_files import refuse_changed
from twofour.pipeline.compare.plan import NO_TORCH, ComparedModel, TorchRequest
from twofour.pipeline.folder import is_run_folder, read_manifest, refuse_outside
from twofour.pipeline.onnx_inputs import asked_or_opt, load_inputs, random_inputs
from twofour.pipeline.sources.inputs import read_arrays, save_arrays, stored_arrays
from twofour.pipeline.sources.source import IN_MEMORY, safe_name
from twofour.pipeline.stages import (
    BUILD,
    DENSE,
    INPUTS,
    SPARSE,
    WEIGHTS,
    onnx_files,
    onnx_name,
    reference_name,
)
from twofour.records.export import TensorShape
from twofour.records.options import BuildOptions, CompareOptions, ExampleInputs, Variant
from twofour.records.run import BuildResult, RunManifest
from twofour.store import read_record

RUNS = Path("runs")
FOLDER = "compare"
"""Where a comparison keeps what it builds, inside the folder of its results."""
_PLANS = (".plan", ".engine", ".trt")
_EXAMPLES = "inputs.npz"
NOT_LOADABLE = (
    "the run was given a module in memory, which cannot be loaded again: name a file.py:callable "
    "to prune-export-build where torch variants are to be timed"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Models with the inputs they are run on, and where the results go."""

    source: str
    """As the user named it."""
    folder: Path
    is_run: bool
    """`folder` is a run folder, whose report shows the comparison."""
    models: tuple[ComparedModel, ...]
    onnx: tuple[OpenedModel, ...]
    """The ONNX files among them, in their order; worker processes parse for themselves."""
    inputs: Mapping[str, np.ndarray]
    """Example inputs by name."""
    reference: Mapping[str, np.ndarray] | None
    """Outputs of the dense module in float32 on them; None: the first ONNX file has to do."""
    build: BuildOptions
    made_up: bool = False
    """`inputs` are random numbers of shapes that nobody gave."""

    @property
    def work(self) -> Path:
        """Folder for plans and quantised files."""
        return self.folder / FOLDER

    @property
    def examples(self) -> Path:
        """The example inputs as a file for worker processes."""
        return self.work / _EXAMPLES

    def save_examples(self) -> None:
        """Write that file."""
        self.work.mkdir(parents=True, exist_ok=True)
        save_arrays(self.examples, dict(self.inputs))


def open_compared(paths: Sequence[Path], out: Path | None, options: CompareOptions) -> Compared:
    """From one run folder, or from ONNX files and TensorRT plans.

    Raises BadInputError for anything else, a folder that holds no model, and models that take
    different inputs.
    """
    if len(paths) == 1 and paths[0].is_dir():
        return _of_run(paths[0], out, options)
    for path in paths:
        if path.is_dir():
            raise BadInputError(f"{path} is a folder among files", hint="name it alone")
        if path.suffix.lower() not in {".onnx", *_PLANS}:
            raise BadInputError(
                f"{path} is neither an ONNX file nor a TensorRT engine ({', '.join(_PLANS)})",
                hint="for a torch model run prune-export-build first and name its run folder",
            )
        if not path.is_file():
            raise BadInputError(f"cannot read {path}: no such file")
    return _of_files(paths, out, options)


def _of_run(folder: Path, out: Path | None, options: CompareOptions) -> Compared:
    if not is_run_folder(folder):
        raise BadInputError(
            f"{folder} is not a run folder",
            hint="name one that prune-export-build or build made, or ONNX files",
        )
    here = [v for v in (DENSE, SPARSE) if (folder / onnx_name(v)).is_file()]
    if not here:
        raise BadInputError(
            f"{folder} holds no ONNX file yet", hint="run prune-export-build or build first"
        )
    _refuse_changed(folder)
    files = tuple(open_onnx(folder / onnx_name(variant)) for variant in here)
    shapes = files[0].inputs
    own = folder / INPUTS
    asked = _asked_inputs(options, shapes)
    inputs = asked or (stored_arrays(own) if own.is_file() else _made_up(shapes, folder))
    names = tuple(s.name for s in shapes), tuple(o.name for o in files[0].outputs)
    reference = folder / reference_name(DENSE)
    manifest = read_manifest(folder)
    built = read_record(BuildResult, folder / BUILD) if (folder / BUILD).is_file() else None
    plans = {} if built is None else _plans(folder, built)
    models = (_model_of_run(folder, manifest, v, names, plans if v == SPARSE else {}) for v in here)
    return Compared(
        source=str(folder),
        folder=out or folder,
        is_run=out is None,
        models=tuple(
            replace(model, precision=_precision(file))
            for model, file in zip(models, files, strict=True)
        ),
        onnx=files,
        inputs=inputs,
        reference=stored_arrays(reference) if asked is None and reference.is_file() else None,
        build=_with_shapes(built.options if built else BuildOptions(), options, inputs, files[0]),
        made_up=asked is None and not own.is_file(),
    )


def _refuse_changed(folder: Path) -> None:
    """Raises BadInputError for a model, its inputs or a plan that the run did not leave so."""
    models = [onnx_files(folder / onnx_name(v)) for v in (DENSE, SPARSE)]
    plans = (f"{variant}.plan" for variant in (DENSE, SPARSE))
    names = (*(n for of in models for n in of), WEIGHTS, INPUTS, reference_name(DENSE), *plans)
    there = [name for name in names if (folder / name).is_file()]
    refuse_changed(folder, there)


def _model_of_run(
    folder: Path,
    manifest: RunManifest,
    variant: Variant,
    names: tuple[tuple[str, ...], tuple[str, ...]],
    plans: Mapping[tuple[str, str], Path],
) -> ComparedModel:
    weights = folder / WEIGHTS
    torch = None
    in_memory = manifest.source.startswith(IN_MEMORY)
    if not (in_memory or manifest.source.lower().endswith(".onnx")) and weights.is_file():
        torch = TorchRequest(
            source=_dense_source(manifest) if variant == DENSE else manifest.source,
            arguments=ExampleInputs(
                inputs=manifest.inputs,
                input_shapes=manifest.input_shapes,
                input_shape_names=manifest.input_shape_names,
                seed=manifest.seed,
            ),
            weights=weights if variant == SPARSE else None,
            input_names=names[0],
            output_names=names[1],
        )
    return ComparedModel(
        weights=variant.value,
        onnx=folder / onnx_name(variant),
        plans=plans,
        torch=torch,
        no_torch=NOT_LOADABLE if in_memory else NO_TORCH,
        dense=variant == DENSE,
    )


def _precision(model: OpenedModel) -> str:
    return precisions_of(model.proto).in_words


def _dense_source(manifest: RunManifest) -> str:
    """The model that the run was told is the dense one, else the one that it pruned."""
    return manifest.dense_reference or manifest.source


def _plans(folder: Path, built: BuildResult) -> dict[tuple[str, str], Path]:
    """Both plans of a run come from sparse.onnx: "dense" is the one with sparsity off."""
    engine = built.engine.engine
    if engine not in ENGINES:  # of a folder made elsewhere
        return {}
    for variant in built.variants:
        refuse_outside(folder / BUILD, variant.plan or "")
    allowed = {mode.sparse_kernels: mode.name for mode in ENGINES[engine].engine().modes}
    return {
        (engine, allowed[v.sparse_weights]): folder / v.plan
        for v in built.variants
        if v.plan and (folder / v.plan).is_file()
    }


def _plan_engine() -> tuple[str, str]:
    """Engine and mode of a plan that anyone has built."""
    row = next(row for row in ENGINES.values() if row.takes is Takes.PLAN)
    return row.name, row.engine().modes[0].name


def _with_shapes(
    build: BuildOptions,
    options: CompareOptions,
    inputs: Mapping[str, np.ndarray],
    model: OpenedModel | None,
) -> BuildOptions:
    """--shapes in place of what a build had, for all inputs of the file."""
    asked = parse_shapes(options.shapes)
    if not asked or model is None:
        return replace(build, shapes=asked) if asked else build
    profiles = profiles_for(asked, model.inputs, shapes_of(inputs), model.size_ranges)
    return replace(build, shapes=profiles)


def _of_files(paths: Sequence[Path], out: Path | None, options: CompareOptions) -> Compared:
    opened = {path: open_onnx(path) for path in paths if path.suffix.lower() not in _PLANS}
    models = tuple(
        _model_of_file(label, path, opened.get(path))
        for label, path in zip(_labels(paths), paths, strict=True)
    )
    folder = out or RUNS / safe_name("-".join(["compare", *(m.weights for m in models[:3])]))
    files = tuple(opened[path] for path in paths if path in opened)
    inputs = _inputs_of_files(files, options)
    return Compared(
        source=" ".join(map(str, paths)),
        folder=folder,
        is_run=False,
        models=models,
        onnx=files,
        inputs=inputs,
        reference=None,
        build=_with_shapes(BuildOptions(), options, inputs, files[0] if files else None),
        made_up=options.inputs is None and not options.input_shapes,
    )


def _model_of_file(label: str, path: Path, opened: OpenedModel | None) -> ComparedModel:
    if opened is None:
        return ComparedModel(weights=label, plans={_plan_engine(): path})
    return ComparedModel(weights=label, onnx=path, precision=_precision(opened))


def _labels(paths: Sequence[Path]) -> tuple[str, ...]:
    """File stems; with the folder before it where two files have the same, and then a number."""
    stems = Counter(path.stem for path in paths)
    labels = [
        path.stem if stems[path.stem] == 1 else f"{path.absolute().parent.name}-{path.stem}"
        for path in paths
    ]
    seen: Counter[str] = Counter()
    for index, label in enumerate(labels):
        seen[label] += 1
        if labels.count(label) > 1:
            labels[index] = f"{label}-{seen[label]}"
    return tuple(labels)


def _inputs_of_files(
    files: Sequence[OpenedModel], options: CompareOptions
) -> Mapping[str, np.ndarray]:
    """Example inputs that every file takes: as asked for, else random."""
    if not files:
        if options.inputs is None:
            raise BadInputError(
                "engines alone do not say their inputs here", hint="give them with --inputs .npz"
            )
        return read_arrays(Path(options.inputs))
    shapes = [file.inputs for file in files]
    for file, other in zip(files[1:], shapes[1:], strict=True):
        if [s.name for s in other] != [s.name for s in shapes[0]]:
            raise BadInputError(
                f"{file.path} takes the inputs {[s.name for s in other]}, "
                f"{files[0].path} takes {[s.name for s in shapes[0]]}",
                hint="only models with the same inputs can be compared",
            )
    merged = tuple(map(_fixed_in_any, zip(*shapes, strict=True)))
    asked = _asked_inputs(options, merged)
    return _made_up(merged, files[0].path, options) if asked is None else asked


def _fixed_in_any(same: tuple[TensorShape, ...]) -> TensorShape:
    """One input in all files: a dimension that any of them fixes is that, the others are free."""
    if len({len(tensor.shape) for tensor in same}) > 1:
        return same[0]
    dims = zip(*(tensor.shape for tensor in same), strict=True)
    fixed = (next((d for d in of if isinstance(d, int)), of[0]) for of in dims)
    return replace(same[0], shape=tuple(fixed))


def _asked_inputs(
    options: CompareOptions, shapes: tuple[TensorShape, ...]
) -> Mapping[str, np.ndarray] | None:
    if options.inputs is not None:
        return load_inputs(Path(options.inputs), shapes)
    if options.input_shapes:
        return _made_up(shapes, Path("the model"), options)
    return None


def _made_up(
    shapes: tuple[TensorShape, ...], model: Path, options: CompareOptions | None = None
) -> Mapping[str, np.ndarray]:
    """Random inputs; `model` is what an error names. Shapes as asked for, else opt of --shapes."""
    options = options or CompareOptions()
    asked = asked_or_opt(options, parse_shapes(options.shapes))
    return random_inputs(shapes, options.seed, asked, str(model))
