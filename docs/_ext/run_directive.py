"""The directive `run`: shell commands that are run while the site is built, and what they print.

    ```{run}
    :exit: 4
    :lines: 1-12
    twofour validate runs/model
    ```

The blocks of a page run one after the other in one empty folder, where `examples` and `tests` are
those of the repository. A block that ends otherwise than in `exit` (0) is a warning, which fails
the build. `lines` says which lines of the output are shown (`-8`: the last eight; `1-0`: none).
Times that other processes disturbed while the site was built are left out. `show` names an HTML
page that the commands made. It is put below in a frame, light or dark as the reader's system, or as
`scheme` says.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from twofour.reports.latency_words import MACHINE_TOO_BUSY

ROOT = Path(__file__).parents[2]
_TIMES = re.compile(r'<section class="latency".*?</section>', re.DOTALL)
_FRAME = '<iframe class="made" src="{}" title="{}" style="color-scheme: {}"></iframe>'


class Run(SphinxDirective):
    """Commands in their block, and below it what they printed."""

    has_content = True
    option_spec: ClassVar = {"exit": int, "lines": str, "show": str, "scheme": str}

    def run(self) -> list[nodes.Node]:
        """Run the commands; warn where they end otherwise than the page says."""
        folder = ROOT / "build" / "site-runs" / self.env.docname
        if not self.env.temp_data.setdefault("has_run", False):
            self.env.temp_data["has_run"] = True
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            for name in ("examples", "tests"):
                (folder / name).symlink_to(ROOT / name)
        asked = "\n".join(self.content)
        code, printed = run_commands(asked, folder)
        if code != self.options.get("exit", 0):
            found = f"ended in {code}:\n{printed}"
            logging.getLogger(__name__).warning(found, location=self.get_location())
        printed = calmed(printed)
        first, _, last = self.options.get("lines", "1-").partition("-")
        lines = [line.rstrip() for line in printed.splitlines()]
        kept = lines[int(first) - 1 : int(last or len(lines))] if first else lines[-int(last) :]
        shown = [nodes.literal_block(asked, asked, language="sh")]
        shown += [
            nodes.literal_block(text, text, language="text") for text in ["\n".join(kept)] if text
        ]
        return [*shown, *([self._frame(folder)] if "show" in self.options else [])]

    def _frame(self, folder: Path) -> nodes.Node:
        """A page that the commands made, copied into the site and shown in a frame."""
        place = Path("_made", self.env.docname, self.options["show"])
        target = Path(self.env.app.outdir, place)
        target.parent.mkdir(parents=True, exist_ok=True)
        page = (folder / self.options["show"]).read_text(encoding="utf-8")
        target.write_text(calmed_page(page), encoding="utf-8")
        address = "../" * self.env.docname.count("/") + place.as_posix()
        frame = _FRAME.format(address, place.name, self.options.get("scheme", "light dark"))
        return nodes.raw("", frame, format="html")


def calmed(printed: str) -> str:
    """The output without the times of a machine that was too busy to compare."""
    before, busy, after = printed.partition(MACHINE_TOO_BUSY)
    if not busy:
        return printed
    later = [part for part in after.split("\n\n")[1:] if not part.startswith("Times, ")]
    return "\n\n".join((before.rstrip(), *later))


def calmed_page(page: str) -> str:
    """The HTML page without its section of times, where the machine was too busy to compare."""
    return _TIMES.sub("", page) if MACHINE_TOO_BUSY in page else page


def run_commands(commands: str, folder: Path) -> tuple[int, str]:
    """Exit code and output of shell commands, of which the first that fails is the last."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    homes = dict.fromkeys(("HOME", "XDG_CONFIG_HOME"), str(folder))
    changed = {**homes, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "96"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env=os.environ | changed,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return done.returncode, done.stdout.decode(errors="replace").replace(f"{folder}/", "")
