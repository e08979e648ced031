"""How Sphinx builds these pages: make docs. Warnings are errors, nothing is fetched."""

import memplan

project = "memplan"
author = "the authors of memplan"
copyright = "the authors of memplan; Apache License 2.0"
version = release = memplan.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_click"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
smartquotes = False  # --option stays two hyphens

# Headings can be linked to; the benchmarks and the README link to files of the repository.
myst_heading_anchors = 3
# Pictures are <img> with a width: GitHub shows them so, too.
myst_enable_extensions = ["html_image"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False

html_theme = "alabaster"
html_title = f"memplan {version}"
html_theme_options = {
    "description": "Activation memory of MXNet training, planned",
    "fixed_sidebar": True,
    "page_width": "1240px",
    "code_font_size": "0.8em",
    "body_max_width": "none",
    "sidebar_width": "230px",
}
html_copy_source = False
html_show_sourcelink = False
