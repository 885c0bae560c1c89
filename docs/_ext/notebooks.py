"""A Jupyter notebook of the repository as a page: its cells are run, and what they gave is shown.

    {{ notebook examples/digits.ipynb }}

The notebook is kept without outputs. Run as a program, this executes the cells of a notebook and
prints what each gave, so that a page's code has a process and a folder of its own.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

ROOT = Path(__file__).parents[2]


class Shown(TypedDict):
    """What a cell printed, with the text of its last expression, or the page of that."""

    text: str
    page: str


def cells_of(notebook: Path) -> list[tuple[str, str]]:
    """Kind (`markdown` or `code`) and text of every cell."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [(cell["cell_type"], "".join(cell["source"])) for cell in cells]


def run_cell(code: str, names: dict[str, object]) -> Shown:
    """Run a cell as Jupyter does: the value of a last line that is an expression is shown."""
    parsed = ast.parse(code)
    last = parsed.body.pop() if isinstance(parsed.body[-1], ast.Expr) else None
    printed = io.StringIO()
    value = None
    with contextlib.redirect_stdout(printed):
        exec(compile(parsed, "<cell>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    to_page = getattr(value, "_repr_html_", None)
    if to_page is not None:
        return Shown(text=printed.getvalue(), page=to_page())
    text = "" if value is None else f"{value!r}\n"
    return Shown(text=printed.getvalue() + text, page="")


def as_page(notebook: Path, folder: Path) -> str:
    """The notebook as Markdown with what its cells gave, run in the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "examples").symlink_to(ROOT / "examples")
    homes = dict.fromkeys(("HOME", "XDG_CONFIG_HOME"), str(folder))
    done = subprocess.run(
        [sys.executable, __file__, str(notebook)],
        cwd=folder,
        env=os.environ | homes | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{notebook.name}: {done.stderr}")
    return "\n\n".join(_parts(cells_of(notebook), json.loads(done.stdout)))


def _parts(cells: list[tuple[str, str]], shown: list[Shown]) -> Iterator[str]:
    gave = iter(shown)
    for kind, text in cells:
        if kind == "markdown":
            yield text
            continue
        yield f"```python\n{text}\n```"
        result = next(gave)
        if result["text"]:
            yield f"```text\n{result['text'].rstrip()}\n```"
        if result["page"]:
            yield f"```{{raw}} html\n{result['page']}\n```"


if __name__ == "__main__":
    names: dict[str, object] = {"__name__": "__main__"}
    code = [text for kind, text in cells_of(Path(sys.argv[1])) if kind == "code"]
    sys.path.insert(0, "")
    sys.stdout.write(json.dumps([run_cell(text, names) for text in code]))
