"""Checks the built site: `python scripts/check_site.py docs/_build/html`.

Every public name (tests/public_api.txt) must be in the reference, and every link and picture within the site must lead
somewhere, to the anchor. No link may lead to the repository, Colab or PyPI before jaxshard is there (`PUBLISHED` in
docs/conf.py). The gallery must have every picture of the notebooks. It prints what is wrong, and exits with 1 if
anything is. `check_site_widths.py` looks at the site in a browser.
"""

import pathlib
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

from sphinx.util.inventory import InventoryFile

ROOT = pathlib.Path(__file__).parents[1]
NAMES = ROOT / "tests" / "public_api.txt"
PICTURES = ROOT / "docs" / "tutorials" / "pictures"  # docs/conf.py takes them from the notebooks
UNPUBLISHED = (
    "https://github.com/jaxshard/",
    "https://colab.research.google.com/",
    "https://pypi.org/project/jaxshard",
)
LEFT_OUT = ("_modules", "_static", "_sources")


class Page(HTMLParser):
    """The links of a page, and the anchors that it has."""

    def __init__(self, path: pathlib.Path):
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors |= {name for name in (found.get("id"), found.get("name")) if name}
        if link := found.get("href" if tag == "a" else "src" if tag in ("img", "script", "object") else ""):
            self.links.append(link)


def undocumented(site: pathlib.Path) -> Iterator[str]:
    """The public names that the reference lacks; names of one thing on two paths count where one is there."""
    with (site / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, path: path)
    there = {name for kind, names in inventory.items() if kind.startswith("py:") for name in names}
    for line in NAMES.read_text().splitlines():
        name = line.split("(")[0]
        if name not in there and name.replace("jaxshard.mesh.", "jaxshard.", 1) not in there:
            yield f"{name} is not in the reference: add it to a page of docs/reference"


def read(site: pathlib.Path) -> dict[pathlib.Path, Page]:
    paths = [path for path in sorted(site.rglob("*.html")) if path.relative_to(site).parts[0] not in LEFT_OUT]
    return {path: Page(path) for path in paths}


def dead_links(site: pathlib.Path, pages: dict[pathlib.Path, Page]) -> Iterator[str]:
    """The links and pictures within the site that lead nowhere."""
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                yield f"{path.relative_to(site)}: {link} is not there"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{path.relative_to(site)}: {link} has no such place"


def unpublished(site: pathlib.Path, pages: dict[pathlib.Path, Page]) -> Iterator[str]:
    """The links to what is not public yet."""
    if re.search(r"^PUBLISHED = True", (ROOT / "docs" / "conf.py").read_text(), re.MULTILINE):
        return
    for path, page in pages.items():
        for link in page.links:
            if link.startswith(UNPUBLISHED):
                yield f"{path.relative_to(site)}: {link} is not public yet: link to the file, as in ](../SECURITY.md)"


def hidden_pictures(site: pathlib.Path, pages: dict[pathlib.Path, Page]) -> Iterator[str]:
    """The notebooks' pictures that the gallery lacks."""
    shown = {pathlib.PurePosixPath(link).name for link in pages[site / "gallery.html"].links}
    for picture in sorted(PICTURES.glob("*.png")):
        if picture.name not in shown:
            yield f"{picture.name} is not in docs/gallery.md: add it, and check the captions of the others"


def main() -> int:
    site = pathlib.Path(sys.argv[1]).resolve()
    pages = read(site)
    wrong = [*undocumented(site)]
    for check in (dead_links, unpublished, hidden_pictures):
        wrong += check(site, pages)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
