"""A page for every command, from Typer's own tree of commands and options."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import typer
from typer.core import TyperCommand, TyperGroup

from twofour.cli import application

_EXAMPLE = re.compile(r"Examples?: ", re.MULTILINE)


def pages() -> Mapping[str, str]:
    """The page of each command by its name, and `index`."""
    group = typer.main.get_command(application())
    assert isinstance(group, TyperGroup)
    made = {
        name: "\n".join(_page(name, command)) + "\n"
        for name, command in group.commands.items()
        if isinstance(command, TyperCommand)
    }
    rows = (f"- [`twofour {name}`]({name}.md): {_summary(group, name)}" for name in made)
    listed = "\n".join(("```{toctree}", ":hidden:", *made, "```"))
    return made | {"index": "# Commands\n\n" + "\n".join(rows) + f"\n\n{listed}\n"}


def _summary(group: TyperGroup, name: str) -> str:
    return (group.commands[name].help or "").split("\n\n")[0].replace("\n", " ")


def _page(name: str, command: TyperCommand) -> Iterator[str]:
    context = typer.Context(command, info_name=f"twofour {name}")
    said, *example = _EXAMPLE.split(command.help or "")
    yield from (f"# twofour {name}", "", escaped(said).strip(), "")
    usage = " ".join(command.collect_usage_pieces(context))
    yield from ("```text", f"twofour {name} {usage}", "```", "")
    if example:
        yield from ("## Example", "", "```sh", *example[0].strip().splitlines(), "```", "")
    for title, kind in (("Arguments", "argument"), ("Options", "option")):
        chosen = [p for p in command.get_params(context) if p.param_type_name == kind]
        records = [record for p in chosen if (record := p.get_help_record(context))]
        if records:
            yield from (f"## {title}", "")
        for flags, text in records:
            yield from (f"`{flags}`", f": {escaped(text)}", "")


def escaped(text: str) -> str:
    """The text with the marks of Markdown as they are, but for code between backticks."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([\\*_<>\[\]|])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)
