"""Configuration of the documentation site: `make docs` builds it into build/site."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = map(str, (ROOT / "docs/_ext", ROOT / "src", ROOT / "benchmarks", ROOT / "tests"))

from twofour.packages import __version__

project = "twofour"
version = release = __version__
html_title = f"twofour {__version__}"
extensions = [
    *("myst_parser", "sphinx.ext.autodoc", "sphinx.ext.doctest"),
    *("generated_pages", "run_directive", "page_checks"),
]
exclude_patterns = ["_ext"]

html_theme = "furo"
html_show_copyright = html_show_sourcelink = False
pygments_style, pygments_dark_style = "friendly", "github-dark"

myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 3
myst_links_external_new_tab = False
suppress_warnings = ["myst.header"]  # CONTRIBUTING.md is included below a title of its own

default_role = "code"  # docstrings have Markdown's backticks
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False

doctest_test_doctest_blocks = "default"
linkcheck_anchors = False
