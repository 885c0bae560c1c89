"""What is compared, opened: a run folder, or ONNX files and engines, with inputs that fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path

import numpy as np

from twofour.engines.tensorrt.bindings import precisions_of
from twofour.engines.tensorrt.plan import GPU, plan_mode
from twofour.errors import BadInputError
from twofour.graph.opened import OpenedModel, open_onnx
from twofour.inputs.examples import (
    asked_shapes,
    load_inputs,
    parse_shapes,
    profiles_for,
    random_inputs,
)
from twofour.inputs.fits import Arrays, read_arrays, shapes_of, stored_arrays
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
from twofour.records import frozen
from twofour.records.export import Accuracy, TensorShape
from twofour.records.options import BuildOptions, CompareOptions, ExampleInputs, Variant
from twofour.records.run import BuildResult
from twofour.records.weights import shared
from twofour.sources.source import IN_MEMORY, safe_name
from twofour.store import record_if_there

NO_TORCH = (
    "there is no torch module: compare a run folder that was made from one which can be loaded "
    "again, such as file.py:callable"
)
_PLANS = (".plan", ".engine", ".trt")


@frozen
class TorchRequest:
    """A torch module to build from its source, with dense or saved weights."""

    source: str
    arguments: ExampleInputs
    weights: Path | None
    """Saved by the prune stage; None: those of the source."""
    inputs: tuple[TensorShape, ...]
    """The inputs of the ONNX file, in its order, which is that of the module's arguments."""
    output_names: tuple[str, ...]


@frozen
class ComparedModel:
    """One set of weights in every form there is of it."""

    weights: str
    """Label: dense, sparse, or the file's stem."""
    onnx: Path | None = None
    plans: Mapping[str, Path] = field(default_factory=dict)
    """Mode of TensorRT -> a plan that is there already."""
    torch: TorchRequest | None = None
    precision: str = "unknown"
    """Types of the ONNX file's graph; those of a plan are unknown."""
    dense: bool = False
    """Known not to be pruned: it is not run in modes that only take 2:4 weights."""


@frozen
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
    no_baseline: str | None = None
    """Why the run has no dense model to compare with: its model came in 2:4."""
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
        return _open_run(paths[0], out, options)
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
    return _open_files(paths, out, options)


# --- a run folder ---------------------------------------------------------------------------------


def _open_run(folder: Path, out: Path | None, options: CompareOptions) -> ComparisonSetup:
    variants = _variants_there(folder)
    files = tuple(open_onnx(folder / onnx_name(variant)) for variant in variants)
    accuracy = record_if_there(Accuracy, folder / ACCURACY)
    built = record_if_there(BuildResult, folder / BUILD)
    is_asked = _asks_for_inputs(options)
    is_made_up = not (is_asked or (folder / INPUTS).is_file())
    inputs = _inputs_of_run(folder, files[0], options)
    plans = _plans(folder, built, options)
    build = BuildOptions() if built is None else built.options
    return ComparisonSetup(
        source=str(folder),
        folder=out or folder,
        is_run=out is None,
        models=tuple(_models_of_run(folder, variants, files, plans)),
        onnx=files,
        inputs=inputs,
        dense_outputs=None if is_asked else _reference_outputs(folder),
        build=_with_shapes(build, options, inputs, files),
        made_up=is_made_up,
        inputs_are=None if is_asked or accuracy is None else accuracy.inputs_are,
        no_baseline=None if accuracy is None else accuracy.no_baseline,
        run_in=() if built is None else built.times.options.engines,
    )


def _inputs_of_run(folder: Path, file: OpenedModel, options: CompareOptions) -> Arrays:
    """Those that the user asks for, else the run's own, else random ones."""
    own = folder / INPUTS
    if own.is_file() and not _asks_for_inputs(options):
        return stored_arrays(own)
    return _new_inputs(options, file.inputs, folder)


def _reference_outputs(folder: Path) -> Arrays | None:
    """Those of the dense module in float32 on the run's own inputs, where they were kept."""
    saved = folder / reference_name(DENSE)
    return stored_arrays(saved) if saved.is_file() else None


def _variants_there(folder: Path) -> list[Variant]:
    """Those with an ONNX file; raises BadInputError where a file changed since it was recorded."""
    if not is_run_folder(folder):
        raise BadInputError(
            f"{folder} is not a run folder",
            hint="name one that prune-export-build or build made, or ONNX files",
        )
    variants = [v for v in (DENSE, SPARSE) if (folder / onnx_name(v)).is_file()]
    if not variants:
        raise BadInputError(
            f"{folder} contains no ONNX file yet", hint="run prune-export-build or build first"
        )
    names = [final_weights(folder), INPUTS, reference_name(DENSE)]
    for variant in (DENSE, SPARSE):
        names += [*onnx_files(folder / onnx_name(variant)), f"{variant}.plan"]
    refuse_changed(folder, [name for name in names if (folder / name).is_file()])
    return variants


def _models_of_run(
    folder: Path,
    variants: Sequence[Variant],
    files: Sequence[OpenedModel],
    plans: Mapping[Variant, Mapping[str, Path]],
) -> Iterator[ComparedModel]:
    for variant, file in zip(variants, files, strict=True):
        is_dense = variant == DENSE
        yield ComparedModel(
            weights=variant.value,
            onnx=file.path,
            plans=plans.get(variant, {}),
            torch=_torch_of_run(folder, file, is_dense=is_dense),
            precision=precisions_of(file.proto).in_words,
            dense=is_dense,
        )


def _torch_of_run(folder: Path, file: OpenedModel, *, is_dense: bool) -> TorchRequest | None:
    """The module that the run was made from; None where it cannot be loaded again."""
    manifest = read_manifest(folder)
    source = manifest.source
    weights = folder / final_weights(folder)
    if source.startswith(IN_MEMORY) or source.lower().endswith(".onnx") or not weights.is_file():
        return None
    if is_dense and manifest.dense_reference:
        source = manifest.dense_reference
    return TorchRequest(
        source=source,
        arguments=ExampleInputs(**shared(manifest, ExampleInputs)),
        weights=None if is_dense else weights,
        inputs=file.inputs,
        output_names=tuple(tensor.name for tensor in file.outputs),
    )


def _plans(
    folder: Path, built: BuildResult | None, options: CompareOptions
) -> Mapping[Variant, Mapping[str, Path]]:
    """The plans of a run, by their weights and the mode of TensorRT; --shapes asks for others."""
    plans: dict[Variant, dict[str, Path]] = {}
    for variant in () if built is None or options.shapes else built.variants:
        name = variant.plan or ""
        refuse_outside(folder / BUILD, name)
        if (folder / name).is_file():
            plans.setdefault(variant.weights, {})[plan_mode(variant)] = folder / name
    return plans


# --- files ----------------------------------------------------------------------------------------


def _open_files(
    paths: Sequence[Path], out: Path | None, options: CompareOptions
) -> ComparisonSetup:
    labels = _labels(paths)
    models = []
    files = []
    for label, path in zip(labels, paths, strict=True):
        if path.suffix.lower() in _PLANS:  # which anyone has built
            models.append(ComparedModel(weights=label, plans={GPU: path}))
        else:
            files.append(open_onnx(path))
            precision = precisions_of(files[-1].proto).in_words
            models.append(ComparedModel(weights=label, onnx=path, precision=precision))
    inputs = _inputs_of_files(files, options)
    return ComparisonSetup(
        source=" ".join(map(str, paths)),
        folder=out or Path("runs") / safe_name("-".join(["compare", *labels[:3]])),
        is_run=False,
        models=tuple(models),
        onnx=tuple(files),
        inputs=inputs,
        dense_outputs=None,
        build=_with_shapes(BuildOptions(), options, inputs, files),
        made_up=not _asks_for_inputs(options),
    )


def _labels(paths: Sequence[Path]) -> list[str]:
    """File stems; with the folder before it where two files have the same, and then a number."""
    # a.onnx x/b.onnx y/b.onnx z/y/b.onnx: a, x-b, y-b, y-b-4
    stems = Counter(path.stem for path in paths)
    labels: list[str] = []
    for number, path in enumerate(paths, 1):
        label = path.stem
        if stems[label] > 1:
            label = f"{path.absolute().parent.name}-{label}"
        labels.append(f"{label}-{number}" if label in labels else label)
    return labels


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
    first = files[0]
    names = [tensor.name for tensor in first.inputs]
    for file in files[1:]:
        others = [tensor.name for tensor in file.inputs]
        if others != names:
            raise BadInputError(
                f"{file.path} takes the inputs {others}, {first.path} takes {names}",
                hint="only models with the same inputs can be compared",
            )
    alike = zip(*(file.inputs for file in files), strict=True)
    return _new_inputs(options, tuple(map(_fixed_in_any, alike)), first.path)


def _fixed_in_any(same: tuple[TensorShape, ...]) -> TensorShape:
    """One input in all files: a dimension that any of them fixes is that, the others are free."""
    # ["batch", 3, 224, "width"] and [8, 3, 224, "w"]: [8, 3, 224, "width"]
    if len({len(tensor.shape) for tensor in same}) > 1:
        return same[0]
    sizes = []
    for dims in zip(*(tensor.shape for tensor in same), strict=True):
        fixed = [dim for dim in dims if isinstance(dim, int)]
        sizes.append(fixed[0] if fixed else dims[0])
    return replace(same[0], shape=tuple(sizes))


# --- the inputs and shapes of both ----------------------------------------------------------------


def _asks_for_inputs(options: CompareOptions) -> bool:
    return options.inputs is not None or bool(options.input_shapes)


def _new_inputs(
    options: CompareOptions, shapes: tuple[TensorShape, ...], model: Path
) -> Mapping[str, np.ndarray]:
    """Those of --inputs; else random ones in the shapes asked for, else at opt of --shapes."""
    if options.inputs is not None:
        return load_inputs(Path(options.inputs), shapes)
    asked = asked_shapes(shapes, options, parse_shapes(options.shapes))
    return random_inputs(shapes, options.seed, asked, str(model))


def _with_shapes(
    build: BuildOptions, options: CompareOptions, inputs: Arrays, files: Sequence[OpenedModel]
) -> BuildOptions:
    """--shapes, for all inputs of the first file, instead of what a build had."""
    asked = parse_shapes(options.shapes)
    if not asked:
        return build
    if files:
        asked = profiles_for(asked, files[0].inputs, shapes_of(inputs), files[0].size_ranges)
    return replace(build, shapes=asked)
