"""Configuration of the documentation site: `make docs` builds it into build/site."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("docs/_ext", "src", "tests", "tests/eligibility")]
os.environ["XDG_CONFIG_HOME"] = os.devnull  # what the user's runs taught changes no page

import generated_pages
import page_checks
from run_directive import Run
from sphinx.application import Sphinx

from twofour.packages import __version__

project = "twofour"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.doctest"]
html_theme = "furo"
html_title = f"twofour {__version__}"
html_static_path, html_css_files, html_js_files = ["_static"], ["site.css"], ["copy.js"]
html_favicon = "_static/favicon.svg"
html_show_copyright = html_show_sourcelink = html_copy_source = smartquotes = False

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
myst_html_meta = {
    "description": "twofour takes a dense PyTorch or ONNX model to a 2:4-sparse TensorRT engine, "
    "and says for every layer whether sparse math runs in it and why not."
}

default_role = "code"  # docstrings have Markdown's backticks
add_module_names = toc_object_entries = False
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
autodoc_default_options = {"exclude-members": "__init__, __new__"}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
doctest_test_doctest_blocks = ""
linkcheck_anchors = False


def setup(app: Sphinx) -> None:
    """Connect what the site makes and checks beside its pages."""
    app.add_directive("run", Run)
    app.connect("builder-inited", generated_pages.write_pages)
    app.connect("builder-inited", generated_pages.show_kept_comparison)
    app.connect("source-read", generated_pages.fill_page)
    app.connect("doctree-read", page_checks.check_lengths)
    app.connect("doctree-read", generated_pages.leave_out_of_search)
    app.connect("build-finished", page_checks.check_pages)
