"""Sphinx configuration."""

from importlib.metadata import version as installed_version

project = "devstream"
author = "devstream contributors"
project_copyright = "devstream contributors"
release = installed_version("devstream")
version = ".".join(release.split(".")[:2])

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"devstream {release}"

autodoc_member_order = "bysource"
autodoc_typehints = "description"
nitpicky = True

# `sphinx-build -t online` links to torch and Python. Without a network these names are plain text.
if tags.has("online"):  # noqa: F821 - Sphinx puts `tags` into this file
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
    }
else:
    nitpick_ignore_regex = [
        (r"py:.*", r"(torch|collections|typing|contextlib|pathlib|types|enum)\..*"),
        (r"py:(class|exc|obj|data|func)", r"[A-Za-z]+"),  # built-in names
    ]
