"""A page for every command, from Typer's own tree of commands and options."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import typer
from typer.core import TyperCommand, TyperGroup

from twofour.cli import application


def pages() -> Mapping[str, str]:
    """The page of each command by its name, and `index`."""
    group = typer.main.get_command(application())
    assert isinstance(group, TyperGroup)
    commands = {n: c for n, c in group.commands.items() if isinstance(c, TyperCommand)}
    made = {name: "\n".join(_page(name, command)) + "\n" for name, command in commands.items()}
    said = {n: (c.help or "").split("\n\n")[0].replace("\n", " ") for n, c in commands.items()}
    rows = [f"- [`twofour {name}`]({name}.md): {escaped(text)}" for name, text in said.items()]
    return made | {"index": index("Commands", rows, [*made])}


def index(title: str, lines: Sequence[str], names: Sequence[str]) -> str:
    """The page of a folder, which also names its pages to Sphinx."""
    return "\n".join(
        (f"# {title}", "", *lines, "", "```{toctree}", ":hidden:", "", *names, "```", "")
    )


def _page(name: str, command: TyperCommand) -> Iterator[str]:
    context = typer.Context(command, info_name=f"twofour {name}")
    said, _, example = (command.help or "").partition("Example: ")
    usage = " ".join(command.collect_usage_pieces(context))
    yield from (f"# twofour {name}", "", escaped(said).strip(), "")
    yield from ("```sh", " ".join(example.split()), "```", "")
    yield from ("## Usage", "", "```text", f"twofour {name} {usage}", "```", "")
    for title, kind in (("Arguments", "argument"), ("Options", "option")):
        chosen = [p for p in command.get_params(context) if p.param_type_name == kind]
        records = [record for p in chosen if (record := p.get_help_record(context))]
        yield from (f"## {title}", "") if records else ()
        for flags, text in records:
            yield from (f"`{flags}`", f": {escaped(text)}", "")


def escaped(text: str) -> str:
    """The text with the marks of Markdown as they are, but for code between backticks."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([\\*_<>\[\]|])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)
