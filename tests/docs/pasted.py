"""Runs one page's Python blocks, then each page's in a copy of its names: `pasted.py PAGE --expected FILE`.

So does a user who pastes blocks of several pages into one notebook: no page may use a name that another page has left,
or a folder that another page has written. FILE has what each page prints alone (without FILE, PAGE runs alone); it must
print the same after PAGE. Prints what is wrong as JSON.
"""

import argparse
import contextlib
import io
import json
import pathlib
import re
import sys
import tempfile
import time

import pages

WITH_BLOCKS = [name for name, path in pages.PAGES.items() if pages.blocks_of(path)]
# `jaxshard.initialize` raises once JAX has devices, as it must.
MAY_RAISE = {"docs/multihost.md": "must be called before any JAX calls that might initialise the XLA backend"}


class Pasted:
    """A block that runs in a notebook's names, and keeps what it prints."""

    def __init__(self, block, names, shown):
        self.block, self.names, self.shown = block, names, shown
        self.parsed = block.parsed

    def evaluate(self):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * self.block.line + self.parsed, self.block.path, "exec"), self.names)
        self.shown.append(printed.getvalue())
        print(printed.getvalue(), end="")


def paste(page, names, promises):
    """Runs a page's blocks in `names`, and returns what they print."""
    shown = []
    blocks = [Pasted(block, names, shown) for block in pages.blocks_of(pages.PAGES[page])]
    if page == "docs/recipes.md":  # "All recipes begin with this"
        first, *recipes = blocks
        blocks = [block for recipe in recipes for block in (first, recipe)]
    (pages.AFTER.get(page, pages.other) if promises else pages.other)(blocks, names)
    return re.sub(re.escape(tempfile.gettempdir()) + r"/\w+", "TEMP", "".join(shown))


def files():
    return {path for path in pathlib.Path().rglob("*") if not path.is_dir()}


def difference(page, names, expected):
    """What is wrong with a page in a copy of these names, or None; without `expected`, only errors are wrong."""
    before = files()
    try:
        printed = paste(page, dict(names), promises=expected is not None)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        return None if page in MAY_RAISE and MAY_RAISE[page] in what else what
    finally:
        for path in files() - before:
            path.unlink()
    return None if expected in (None, printed) else f"prints {printed!r}, not {expected!r}"


def differences(first, expected):
    """{page: what is wrong with it after the page `first`}; a page pasted twice finds its own files."""
    names = {"__name__": "__main__"}
    paste(first, names, promises=False)
    found = {}
    for page in WITH_BLOCKS:
        started = time.monotonic()
        found[page] = difference(page, names, None if page == first else expected[page])
        print(f"{page} after {first}: {found[page] or 'ok'}, {time.monotonic() - started:.1f} s", file=sys.stderr)
    return {page: what for page, what in found.items() if what}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", choices=WITH_BLOCKS)
    parser.add_argument("--expected", type=pathlib.Path)
    given = parser.parse_args()
    expected = json.loads(given.expected.read_text()) if given.expected else None
    pages.simulate()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        alone = expected is None
        print(json.dumps(paste(given.page, {}, promises=True) if alone else differences(given.page, expected)))
