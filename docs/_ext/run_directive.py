"""The directive `run`: commands that are run while the site is built, with what they print.

    ```{run}
    :exit: 4
    :lines: 1-12
    twofour validate runs/model
    ```

All commands of a page run in a folder of their own, in which `examples/` of the repository is a
link, one block after the other. A block whose last command ends in another exit code than `exit`
(0) is a warning, which ends the build. `lines` shows a part of the output, `hide` none of it;
`show` puts an HTML page that was made into the site, in a frame.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[2]
_FRAME = '<iframe class="made" src="{}" title="{}" style="color-scheme: {}"></iframe>'
_log = logging.getLogger(__name__)


class Run(SphinxDirective):
    """Commands in their block, and below it what they printed."""

    has_content = True
    option_spec: ClassVar = {
        "exit": int,
        "lines": str,
        "hide": directives.flag,
        "show": str,
        "scheme": str,
    }

    def run(self) -> list[nodes.Node]:
        """Run the commands; warn where they end otherwise than the page says."""
        folder = Path(self.env.app.outdir).parent / "site-runs" / self.env.docname
        if not self.env.temp_data.setdefault("runs", 0):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            (folder / "examples").symlink_to(ROOT / "examples")
        self.env.temp_data["runs"] += 1
        code, printed = run_commands("\n".join(self.content), folder)
        if code != self.options.get("exit", 0):
            _log.warning("ended in %d:\n%s", code, printed, location=self.get_location())
        asked = nodes.literal_block("", "\n".join(self.content), language="sh")
        shown = [asked, *([] if "hide" in self.options else [self._output(printed)])]
        return shown + ([self._frame(folder)] if "show" in self.options else [])

    def _output(self, printed: str) -> nodes.Node:
        first, _, last = self.options.get("lines", "1-").partition("-")
        lines = printed.splitlines()[int(first) - 1 : int(last) if last else None]
        return nodes.literal_block("", "\n".join(lines), language="text", classes=["printed"])

    def _frame(self, folder: Path) -> nodes.Node:
        """A page that the commands made, copied into the site and shown in a frame."""
        place = Path("_made", self.env.docname, self.options["show"])
        target = Path(self.env.app.outdir, place)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / self.options["show"], target)
        address = "../" * self.env.docname.count("/") + place.as_posix()
        frame = _FRAME.format(address, place.name, self.options.get("scheme", "light dark"))
        return nodes.raw("", frame, format="html")


def run_commands(commands: str, folder: Path) -> tuple[int, str]:
    """Exit code and output of shell commands; the first that fails is the last that runs."""
    found = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TWOFOUR_")},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "HOME": str(folder),
        "COLUMNS": "100",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env=found,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return done.returncode, done.stdout.decode(errors="replace").replace(f"{folder}/", "")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive with Sphinx."""
    app.add_directive("run", Run)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
