"""The site, built by `make docs` with Sphinx: https://www.sphinx-doc.org/en/master/usage/configuration.html."""

import pathlib
import re
import shutil
from importlib import metadata

ROOT = pathlib.Path(__file__).parents[1]
REPOSITORY = "https://github.com/jaxshard/jaxshard"

project = "jaxshard"
author = "The jaxshard authors"
copyright = author
version = release = metadata.version("jaxshard")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.coverage",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinxcontrib.programoutput",
]
default_role = "py:obj"  # `name` in a docstring is a link to it, or code
exclude_patterns = ["_build", "decisions/README.md"]
templates_path = ["_templates"]

html_theme = "sphinx_book_theme"
html_title = "jaxshard"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "repository_url": REPOSITORY,
    "use_repository_button": True,
    "use_issues_button": True,
    "show_toc_level": 2,
    "navbar_persistent": [],  # the sidebar has a search
}

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the notebooks are kept with their outputs, and tests run them

autosummary_generate = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

coverage_modules = [
    f"jaxshard{name}"
    for name in ("", ".aot", ".checkpoint", ".digest", ".guards", ".inspect", ".mesh", ".plan", ".tensor")
]
coverage_show_missing_items = True


def to_repository(app, name, source):
    """Links to the notebooks lead to their pages, and links to other files beside the site to the repository."""
    folder = "../" * (name.count("/") + 1)
    source[0] = re.sub(rf"\]\({re.escape(folder)}notebooks/(\w+\.ipynb)\)", r"](/tutorials/\1)", source[0])
    source[0] = re.sub(rf"\]\({re.escape(folder)}(?!\.\.)([^)]*)\)", rf"]({REPOSITORY}/blob/main/\1)", source[0])


def copy_notebooks(app):
    """Puts the notebooks, with what they show, where Sphinx finds them."""
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        shutil.copy2(notebook, ROOT / "docs" / "tutorials" / notebook.name)


PLAIN = {}  # docstrings of attributes, as they are written: napoleon takes what stands before a colon for a type


def keep_plain(app, what, name, thing, options, lines):
    """Keeps the docstring of an attribute or a property."""
    if what in ("attribute", "property"):
        PLAIN[name] = list(lines)


def end_code(app, what, name, thing, options, lines):
    """Code that a letter follows, as in `Array`s, ends for reStructuredText too."""
    lines[:] = PLAIN.get(name, lines)
    lines[:] = [re.sub(r"(?<!`)(`[^`]+`)(?=[\w'])", r"\1\\ ", line) for line in lines]


def setup(app):
    app.connect("builder-inited", copy_notebooks)
    app.connect("source-read", to_repository)
    app.connect("autodoc-process-docstring", keep_plain, priority=100)
    app.connect("autodoc-process-docstring", end_code, priority=900)
