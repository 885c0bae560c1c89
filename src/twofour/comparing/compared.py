"""What is compared, opened: a run folder, or ONNX files and engines, with inputs that fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from twofour.engines.protocol import ENGINES, EngineInput
from twofour.engines.tensorrt.bindings import precisions_of
from twofour.errors import BadInputError
from twofour.graph.opened import OpenedModel, open_onnx
from twofour.inputs.examples import (
    asked_shapes,
    load_inputs,
    parse_shapes,
    profiles_for,
    random_inputs,
)
from twofour.inputs.fits import read_arrays, shapes_of, stored_arrays
from twofour.pipeline.folder import (
    ACCURACY,
    BUILD,
    DENSE,
    INPUTS,
    SPARSE,
    final_weights,
    is_run_folder,
    onnx_files,
    onnx_name,
    read_manifest,
    reference_name,
    refuse_changed,
    refuse_outside,
)
from twofour.records.export import Accuracy, TensorShape
from twofour.records.options import BuildOptions, CompareOptions, ExampleInputs, Variant
from twofour.records.run import BuildResult, RunManifest
from twofour.records.weights import shared
from twofour.sources.source import IN_MEMORY, safe_name
from twofour.store import read_record

NO_TORCH = (
    "there is no torch module: compare a run folder that was made from one which can be loaded "
    "again, such as file.py:callable"
)
_PLANS = (".plan", ".engine", ".trt")


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRequest:
    """A torch module to build from its source, with dense or saved weights."""

    source: str
    arguments: ExampleInputs
    weights: Path | None
    """Saved by the prune stage; None: those of the source."""
    inputs: tuple[TensorShape, ...]
    """The inputs of the ONNX file, in its order, which is that of the module's arguments."""
    output_names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedModel:
    """One set of weights in every form there is of it."""

    weights: str
    """Label: dense, sparse, or the file's stem."""
    onnx: Path | None = None
    plans: Mapping[tuple[str, str], Path] = field(default_factory=dict)
    """Engine and mode -> a plan that is there already."""
    torch: TorchRequest | None = None
    precision: str = "unknown"
    """Types of the ONNX file's graph; those of a plan are unknown."""
    dense: bool = False
    """Known not to be pruned: it is not run in modes that only take 2:4 weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSetup:
    """The models to compare, the inputs they are run on, and where the results go."""

    source: str
    """What is compared, as the user named it."""
    folder: Path
    is_run: bool
    """`folder` is a run folder, whose report shows the comparison."""
    models: tuple[ComparedModel, ...]
    onnx: tuple[OpenedModel, ...]
    """The ONNX files among them, in their order; worker processes parse for themselves."""
    inputs: Mapping[str, np.ndarray]
    """Example inputs by name."""
    dense_outputs: Mapping[str, np.ndarray] | None
    """Outputs of the dense module in float32 on them; None: the first ONNX file has to do."""
    build: BuildOptions
    made_up: bool = False
    """`inputs` are random numbers, and nobody gave their shapes."""
    inputs_are: str | None = None
    """What the run's example inputs are; None: others are taken."""
    run_in: tuple[str, ...] = ()
    """engine:mode that the run has timed."""

    @property
    def work(self) -> Path:
        """Folder for plans and quantised files, inside that of the results."""
        return self.folder / "compare"

    @property
    def examples(self) -> Path:
        """The example inputs as a file for worker processes."""
        return self.work / "inputs.npz"


def open_compared(
    paths: Sequence[Path], out: Path | None, options: CompareOptions
) -> ComparisonSetup:
    """Open one run folder, or ONNX files and TensorRT plans; raises BadInputError for others."""
    if len(paths) == 1 and paths[0].is_dir():
        return _of_run(paths[0], out, options)
    for path in paths:
        if path.is_dir():
            raise BadInputError(f"{path} is a folder among files", hint="name it alone")
        if not path.is_file():
            raise BadInputError(
                f"cannot read {path}: no such file", hint="name a run folder or files"
            )
        if path.suffix.lower() not in {".onnx", *_PLANS}:
            raise BadInputError(
                f"{path} is neither an ONNX file nor a TensorRT engine ({', '.join(_PLANS)})",
                hint="for a torch model run prune-export-build first and name its run folder",
            )
    return _of_files(paths, out, options)


def _of_run(folder: Path, out: Path | None, options: CompareOptions) -> ComparisonSetup:
    if not is_run_folder(folder):
        raise BadInputError(
            f"{folder} is not a run folder",
            hint="name one that prune-export-build or build made, or ONNX files",
        )
    here = [v for v in (DENSE, SPARSE) if (folder / onnx_name(v)).is_file()]
    if not here:
        raise BadInputError(
            f"{folder} contains no ONNX file yet", hint="run prune-export-build or build first"
        )
    kept = [final_weights(folder), INPUTS, reference_name(DENSE)]
    for variant in (DENSE, SPARSE):
        kept += [*onnx_files(folder / onnx_name(variant)), f"{variant}.plan"]
    refuse_changed(folder, [name for name in kept if (folder / name).is_file()])
    files = tuple(open_onnx(folder / onnx_name(variant)) for variant in here)
    shapes = files[0].inputs
    own = folder / INPUTS
    asked = _asked_inputs(options, shapes)
    inputs = asked or (stored_arrays(own) if own.is_file() else _made_up(shapes, folder))
    saved = folder / reference_name(DENSE)
    manifest = read_manifest(folder)
    built = read_record(BuildResult, folder / BUILD) if (folder / BUILD).is_file() else None
    plans = {} if built is None else _plans(folder, built)
    return ComparisonSetup(
        source=str(folder),
        folder=out or folder,
        is_run=out is None,
        models=tuple(
            _model_of_run(folder, manifest, variant, file, plans if variant == SPARSE else {})
            for variant, file in zip(here, files, strict=True)
        ),
        onnx=files,
        inputs=inputs,
        dense_outputs=stored_arrays(saved) if asked is None and saved.is_file() else None,
        build=_with_shapes(built.options if built else BuildOptions(), options, inputs, files[0]),
        made_up=asked is None and not own.is_file(),
        inputs_are=_example_inputs_are(folder) if asked is None else None,
        run_in=built.times.options.engines if built else (),
    )


def _example_inputs_are(folder: Path) -> str | None:
    record = folder / ACCURACY
    return read_record(Accuracy, record).inputs_are if record.is_file() else None


def _model_of_run(
    folder: Path,
    manifest: RunManifest,
    variant: Variant,
    file: OpenedModel,
    plans: Mapping[tuple[str, str], Path],
) -> ComparedModel:
    weights = folder / final_weights(folder)
    torch = None
    in_memory = manifest.source.startswith(IN_MEMORY)
    if weights.is_file() and not (in_memory or manifest.source.lower().endswith(".onnx")):
        torch = TorchRequest(
            source=(variant == DENSE and manifest.dense_reference) or manifest.source,
            arguments=ExampleInputs(**shared(manifest, ExampleInputs)),
            weights=weights if variant == SPARSE else None,
            inputs=file.inputs,
            output_names=tuple(tensor.name for tensor in file.outputs),
        )
    return ComparedModel(
        weights=variant.value,
        onnx=file.path,
        plans=plans,
        torch=torch,
        precision=precisions_of(file.proto).in_words,
        dense=variant == DENSE,
    )


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


def _with_shapes(
    build: BuildOptions,
    options: CompareOptions,
    inputs: Mapping[str, np.ndarray],
    model: OpenedModel | None,
) -> BuildOptions:
    """--shapes, for all inputs of the file, instead of what a build had."""
    asked = parse_shapes(options.shapes)
    if asked and model is not None:
        asked = profiles_for(asked, model.inputs, shapes_of(inputs), model.size_ranges)
    return replace(build, shapes=asked) if asked else build


def _of_files(paths: Sequence[Path], out: Path | None, options: CompareOptions) -> ComparisonSetup:
    opened = {path: open_onnx(path) for path in paths if path.suffix.lower() not in _PLANS}
    labels = _labels(paths)
    plan_row = next(row for row in ENGINES.values() if row.takes is EngineInput.PLAN)
    plan_key = (plan_row.name, plan_row.engine().modes[0].name)
    models = []
    for label, path in zip(labels, paths, strict=True):
        if path in opened:
            precision = precisions_of(opened[path].proto).in_words
            models.append(ComparedModel(weights=label, onnx=path, precision=precision))
        else:  # a plan that anyone has built
            models.append(ComparedModel(weights=label, plans={plan_key: path}))
    folder = out or Path("runs") / safe_name("-".join(["compare", *labels[:3]]))
    files = tuple(opened[path] for path in paths if path in opened)
    inputs = _inputs_of_files(files, options)
    return ComparisonSetup(
        source=" ".join(map(str, paths)),
        folder=folder,
        is_run=False,
        models=tuple(models),
        onnx=files,
        inputs=inputs,
        dense_outputs=None,
        build=_with_shapes(BuildOptions(), options, inputs, files[0] if files else None),
        made_up=options.inputs is None and not options.input_shapes,
    )


def _labels(paths: Sequence[Path]) -> tuple[str, ...]:
    """File stems; with the folder before it where two files have the same, and then a number."""
    stems = Counter(path.stem for path in paths)
    labels = [
        path.stem if stems[path.stem] == 1 else f"{path.absolute().parent.name}-{path.stem}"
        for path in paths
    ]
    alike = Counter(labels)
    return tuple(
        label if alike[label] == 1 else f"{label}-{number + 1}"
        for number, label in enumerate(labels)
    )


def _inputs_of_files(
    files: Sequence[OpenedModel], options: CompareOptions
) -> Mapping[str, np.ndarray]:
    """Example inputs that every file takes: as asked for, else random."""
    if not files:
        if options.inputs is None:
            raise BadInputError(
                "the inputs of TensorRT engines are not known here",
                hint="give them: --inputs x.npz",
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
    asked = asked_shapes(shapes, options, parse_shapes(options.shapes))
    return random_inputs(shapes, options.seed, asked, str(model))
