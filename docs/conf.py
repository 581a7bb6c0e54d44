"""The site, built by `make docs` with Sphinx: https://www.sphinx-doc.org/en/master/usage/configuration.html."""

import base64
import json
import pathlib
import re
from importlib import metadata

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms.post_transforms import SphinxPostTransform

ROOT = pathlib.Path(__file__).parents[1]
REPOSITORY = "https://github.com/jaxshard/jaxshard"
PUBLISHED = False  # set it to True once the repository, its notebooks on Colab and the packages on PyPI are public

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
html_title = f"jaxshard {release}"
html_favicon = "_static/logo.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_theme_options = {
    "logo": {"image_light": "_static/logo.svg", "image_dark": "_static/logo.svg", "text": html_title},
    "show_toc_level": 2,
    "navbar_persistent": [],  # the sidebar has a search
}
if PUBLISHED:
    html_theme_options |= {
        "repository_url": REPOSITORY,
        "repository_branch": "main",
        "path_to_docs": "docs",
        "use_repository_button": True,
        "use_issues_button": True,
        "use_edit_page_button": True,
    }

highlight_language = "none"  # a block that names no language is plain output
toc_object_entries_show_parents = "hide"

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
    """Links to the notebooks lead to their pages, and links to other files beside the site to the repository.

    Until the repository is public, the second kind becomes the text with the file's path behind it.
    """
    folder = re.escape("../" * (name.count("/") + 1))
    text = re.sub(rf"\]\({folder}notebooks/(\w+\.ipynb)\)", r"](/tutorials/\1)", source[0])
    beside = rf"(?:{folder}(?!\.\.)|{re.escape(REPOSITORY)}/(?:blob|tree)/main/)"
    link = re.compile(rf"\[((?:[^][`]|`[^`]*`)+)\]\({beside}([^)#]*)(#[^)]*)?\)")
    source[0] = link.sub(rf"[\1]({REPOSITORY}/blob/main/\2\3)" if PUBLISHED else beside_the_site, text)


def beside_the_site(link):
    """What a page shows for a file of the repository that it cannot link to."""
    text, path = link[1], link[2]
    return text if path in text else f"{text} (`{path}`)"


def copy_notebooks(app):
    """Puts the notebooks, with what they show, where Sphinx finds them, and their pictures beside them."""
    folder = ROOT / "docs" / "tutorials"
    (folder / "pictures").mkdir(exist_ok=True)
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        text = path.read_text()
        if not PUBLISHED:  # neither the badge of Colab nor the line that installs jaxshard there
            text = re.sub(r'(?m)^ *"(?:\[!\[Open in Colab|# On Colab:).*\n', "", text)
        update(folder / path.name, text.encode())
        pictures = [
            output["data"]["image/png"]
            for cell in json.loads(text)["cells"]
            for output in cell.get("outputs", ())
            if "image/png" in output.get("data", {})
        ]
        for number, picture in enumerate(pictures, 1):
            update(folder / "pictures" / f"{path.stem[:2]}-{number}.png", base64.b64decode("".join(picture)))


def update(path, content):
    """Writes a file if it changes, so that Sphinx reads again only what did."""
    if not path.exists() or path.read_bytes() != content:
        path.write_bytes(content)


class BreakNames(SphinxPostTransform):
    """Lets long names in code break after `.`, `_` and `(`, and nowhere else; a table's numbers do not break."""

    default_priority = 900
    formats = ("html",)
    after = re.compile(r"(?<=[\w)\]][._(])(?=[A-Za-z\"'*{\[])(?<!__)")

    def run(self):
        for place in list(self.document.findall(holds_names)):
            for text in list(place.findall(nodes.Text)):
                if any(len(word) > 20 for word in text.split()) and not in_block(text):
                    broken = [
                        each for part in self.after.split(text.astext()) for each in (may_break(), nodes.Text(part))
                    ]
                    text.parent.replace(text, broken[1:])
        for cell in self.document.findall(nodes.entry):
            if len(cell.astext()) <= 20 and len(cell.astext().split()) == 1:
                cell["classes"].append("short")
        for prefix in list(self.document.findall(addnodes.desc_addname)):  # as `jaxshard.` before a name
            prefix += may_break()
        for parameters in list(self.document.findall(addnodes.desc_parameterlist)):
            if parameters.children:
                parameters[0].insert(0, may_break())


def may_break():
    return nodes.raw("", "<wbr>", format="html")


def holds_names(node):
    return isinstance(node, nodes.literal | addnodes.desc_signature | nodes.field_body)


def in_block(node):
    """Whether text is of a block of code, which does not break."""
    return isinstance(node, nodes.FixedTextElement) or (node.parent is not None and in_block(node.parent))


def leave_room(app, name, template, context, doctree):
    """Notebooks have code of 120 columns, so their contents are not beside it."""
    if re.match(r"tutorials/\d", name):
        context["meta"] = {**(context.get("meta") or {}), "html_theme.sidebar_secondary.remove": "true"}


def edit_notebook(app, name, template, context, doctree):
    """The button that leads to a notebook's source names the folder that it was copied from."""
    for group in context.get("header_buttons", ()):
        for button in group.get("buttons", ()):
            if re.match(r"tutorials/\d", name) and "url" in button:
                button["url"] = button["url"].replace("/main/docs/tutorials/", "/main/notebooks/")


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
    app.add_post_transform(BreakNames)
    app.connect("builder-inited", copy_notebooks)
    app.connect("source-read", to_repository)
    app.connect("html-page-context", leave_room)
    app.connect("html-page-context", edit_notebook, priority=900)
    app.connect("autodoc-process-docstring", keep_plain, priority=100)
    app.connect("autodoc-process-docstring", end_code, priority=900)
