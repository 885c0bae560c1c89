"""The stage that puts both exports together and judges sparse.onnx by the rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from twofour.errors import PatternBrokenError
from twofour.pipeline.stages import LAYERS, Made, Run, Stage, onnx_files
from twofour.records.export import ExportedFile, ExportedModel, ExportResult, LayerMap, OnnxFile
from twofour.records.pruning import PruneResult, Validation, WeightCheck
from twofour.records.run import ExportedVariant, VariantCheck
from twofour.records.weights import shared
from twofour.store import write_record


def put_together(
    run: Run,
    pruned: PruneResult,
    variants: Sequence[ExportedVariant],
    checks: Sequence[VariantCheck],
) -> Stage[ExportResult]:
    """export.json and layers.json over the variants, the sparse one last.

    Raises PatternBrokenError when a weight that was pruned is not N:M in sparse.onnx.
    """
    from twofour.pruning.verify import validate_onnx

    sparse = variants[-1]
    path = run.file(sparse.onnx.file)

    def work() -> Made[ExportResult]:
        required = initializers_of_pruned(pruned, sparse.layers)
        checked = validate_onnx(run.models.open(path), pruned.pattern, required=required)
        checked = replace(with_layer_names(checked, sparse.layers), files=(path.name,))
        refuse_broken(checked, path.name)
        write_record(run.file(LAYERS), sparse.layers)
        return ExportResult(
            **shared(sparse, ExportedModel)
            | {"notes": tuple(note for exported in variants for note in exported.notes)},
            files=tuple(map(exported_file, variants, checks)),
            pattern=checked,
        ), (LAYERS,)

    return Stage(
        name="export",
        title="validate the exported model",
        record="export.json",
        kind=ExportResult,
        work=work,
        reads=(
            "prune.json",
            *onnx_files(path),
            *(f"stages/export-{v.onnx.variant}.json" for v in variants),
            *(f"stages/check-{v.onnx.variant}.json" for v in variants),
        ),
    )


def exported_file(exported: ExportedVariant, checked: VariantCheck) -> ExportedFile:
    """What was written, and how well it agrees with the module."""
    return ExportedFile(
        **shared(exported.onnx, OnnxFile),
        agreement=checked.agreement,
        not_compared=checked.not_compared,
    )


def pruned_names(pruned: PruneResult) -> frozenset[str]:
    """state_dict keys, or initializers, of the weights that were pruned."""
    names = (row.weight.weight for row in pruned.weights if row.pruned)
    return frozenset(name for name in names if name is not None)


def initializers_of_pruned(pruned: PruneResult, layers: LayerMap) -> frozenset[str]:
    """Names, in the ONNX file, of the weights that were pruned."""
    parameters = pruned_names(pruned)
    return frozenset(name.initializer for name in layers.layers if name.parameter in parameters)


def with_layer_names(validation: Validation, layers: LayerMap) -> Validation:
    """The rows of an ONNX file under the names of its modules."""
    names = {name.initializer: name.layer for name in layers.layers}
    checks = tuple(replace(c, layer=names.get(c.weight) or c.layer) for c in validation.checks)
    return replace(validation, checks=checks)


def refuse_broken(validation: Validation, file: str) -> None:
    """Raise PatternBrokenError naming the first weight that was to be N:M and is not."""
    if validation.broken:
        first = validation.broken[0]
        raise PatternBrokenError(
            f"{file}: {len(validation.broken)} pruned weights are not {validation.pattern}; "
            f"{describe_broken(first)}",
            hint="something changed the weights after pruning; `twofour validate` lists them all",
        )


def describe_broken(check: WeightCheck) -> str:
    """One line: layer, weight, how many groups, and where the first is."""
    return (
        f"first: layer {check.layer}, weight {check.weight} {list(check.shape)}, axis "
        f"{check.axis}: {check.violations} of {check.groups_checked} groups, "
        f"first at {list(check.first_violation or ())}"
    )
