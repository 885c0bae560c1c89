"""Options on what pruning may cost, and where that is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from twofour.errors import BadInputError
from twofour.records.options import BudgetOptions, LossKind, SideBySide


def _known_loss(word: str | None) -> str | None:
    """Raises typer.BadParameter for a word that is no LossKind."""
    known = [kind.value for kind in LossKind]
    if word is not None and word not in known:
        raise typer.BadParameter(f"{word!r} is not one of {', '.join(known)}.")
    return word


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetArguments:
    """What every command is told that measures what layers lose."""

    max_drop: Annotated[
        str | None,
        typer.Option(
            "--max-drop",
            metavar="[FIGURE=]DROP",
            help="Leave layers dense until the metric falls by no more, in its own units.",
        ),
    ] = None
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget",
            metavar="SHARE",
            help="Least part of the possible saving, 0 to 1, for the least loss.",
        ),
    ] = None
    lower_is_better: Annotated[
        bool,
        typer.Option("--lower-is-better", help="The metric falls where it grows: a loss, say."),
    ] = False
    loss: Annotated[
        str | None,
        typer.Option(
            "--loss",
            metavar=f"[{'|'.join(kind.value for kind in LossKind)}]",
            help="What layers are judged by.",
            show_default="the metric, without one the outputs",
            callback=_known_loss,
        ),
    ] = None
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            metavar="FOLDER|FILE",
            help="Milliseconds of each layer: a run folder with a TensorRT build, or JSON or CSV.",
            show_default="multiply-adds count",
        ),
    ] = None
    siblings: Annotated[
        bool,
        typer.Option(
            "--siblings", help="Decide together on layers that read one tensor (q, k, v)."
        ),
    ] = False
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", min=1, help="Measurements at once.", show_default="cores"),
    ] = None
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="Measure on a Ray cluster whose nodes see the same files at the same paths; auto: "
            "a local one.",
        ),
    ] = None

    def budget_options(self) -> BudgetOptions:
        """As a record; raises BadInputError for a drop that is no number."""
        figure, _, text = (self.max_drop or "").rpartition("=")
        try:
            drop = None if self.max_drop is None else float(text)
        except ValueError:
            raise BadInputError(
                f"--max-drop: {self.max_drop!r} is no number", hint="write 0.5, or accuracy=0.5"
            ) from None
        return BudgetOptions(
            max_drop=drop,
            share=self.budget,
            figure=figure.strip() or None,
            lower_is_better=self.lower_is_better,
            loss=None if self.loss is None else LossKind(self.loss),
            profile=None if self.profile is None else str(self.profile),
            siblings=self.siblings,
        )

    def side_by_side(self) -> SideBySide:
        """Where measurements are made; raises BadInputError for both."""
        if self.jobs is not None and self.ray is not None:
            raise BadInputError(
                "--jobs and --ray ask for two things",
                hint="a Ray cluster says how many it has room for",
            )
        return SideBySide(jobs=self.jobs, ray=self.ray)
