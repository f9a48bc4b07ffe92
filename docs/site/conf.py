"""Sphinx's settings of the site. Nothing is fetched from elsewhere: no fonts, no scripts; the search is the site's own."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from reference import literal

from shardlib.common.version import VERSION

project = "shardlib"
release = version = VERSION
copyright = "the shardlib authors, Apache-2.0"
html_title = f"shardlib {VERSION}"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_design"]
exclude_patterns = ["_*"]
default_role = "py:obj"  # in docstrings, `name` is a name of the library where there is one, and else code
add_module_names = False
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
toc_object_entries = False  # headings name them already, and each page copies the whole tree
napoleon_use_rtype = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 88

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # notebooks are shown with the outputs that they were committed with; the tests run them
nb_merge_streams = True

html_theme = "furo"
html_static_path = ["static"]
html_favicon = "static/favicon.svg"
html_css_files = ["site.css"]
html_js_files = ["filter.js"]
html_show_sphinx = False
html_copy_source = False
templates_path: list[str] = []
html_theme_options = {"navigation_with_keys": False, "source_view_link": "", "source_edit_link": ""}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def plain(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Examples stay; in the text stars and underscores are themselves."""
    lines[:] = [line if line.lstrip().startswith((">>>", "...")) else literal(line) for line in lines]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", plain, priority=400)  # before napoleon's, at 500
