"""What Sphinx is told of these pages. It needs no network: names of others link by `extlinks` to their own sites."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "_ext")]

from torch_join import __version__  # noqa: E402

project = "torch-join"
copyright = "the torch-join authors"  # noqa: A001
version = release = __version__

extensions = [
    "error_messages",
    "markdown_docstrings",
    "private_names",
    "walk_diagrams",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.extlinks",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build"]
default_role = "literal"  # as docstrings write names

# By kind of name, where its documentation is: {torch}`torch.nn.Linear`.
extlinks = {
    "torch": ("https://docs.pytorch.org/docs/stable/generated/%s.html", "%s"),
    "source": ("https://github.com/torch-join/torch-join/blob/main/%s", "%s"),
}
extlinks_detect_hardcoded_links = False

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"torch-join {release}"
html_static_path = ["_static"]
html_css_files = ["torch_join.css"]
html_js_files = ["accessible.js"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "default"
pygments_dark_style = "monokai"
