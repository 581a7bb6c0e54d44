"""Runs every page's Python blocks after those of every other page: `python -W error tests/docs/pasted.py [PAGE...]`.

So does a user who pastes blocks of several pages into one notebook: no page may use a name that another page has left,
or a folder that another page has written. Each page first runs alone. Then all pages run in copies of the names that
each page has left (or only those PAGEs), in its folder; they must keep their promises and print the same as alone.
Prints {page: {the page after it: what is wrong}} as JSON.
"""

import contextlib
import io
import itertools
import json
import pathlib
import re
import sys
import tempfile

import pages

WITH_BLOCKS = [name for name, path in pages.PAGES.items() if pages.blocks_of(path)]
FIRST = "docs/multihost.md"  # `jaxshard.initialize` comes before all that asks JAX for devices, else it raises this:
TOO_LATE = "must be called before any JAX calls that might initialise the XLA backend"
MOST_PROGRAMS = 1000  # that are kept, of about 500


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


def paste(page, names, promises=True):
    """Runs a page's blocks in `names`, and returns what they print."""
    shown = []
    blocks = [Pasted(block, names, shown) for block in pages.blocks_of(pages.PAGES[page])]
    if page in pages.RECIPES:
        lines, (first, *rest) = pages.PAGES[page].read_text().splitlines(), blocks
        recipes = itertools.groupby(rest, lambda one: sum(line.startswith("## ") for line in lines[: one.block.line]))
        blocks = [block for _, recipe in recipes for block in (first, *recipe)]
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
        return None if page == FIRST and TOO_LATE in what else what
    finally:
        for path in files() - before:
            path.unlink()
    return None if expected in (None, printed) else f"prints {printed!r}, not {expected!r}"


def differences(after, folder):
    """{page: {the page after it: what is wrong}}. A page that is pasted twice finds its own files."""
    sys.path.insert(0, str(pages.ROOT / "tests"))
    from compiled_once import keep_programs

    printed, names, found = {}, {}, {}
    for page in sorted(WITH_BLOCKS, key=FIRST.__ne__):
        (folder / page).mkdir(parents=True)
        names[page] = {"__name__": "__main__"}
        with contextlib.chdir(folder / page):
            printed[page] = paste(page, names[page])
        if page == FIRST:
            keep_programs(MOST_PROGRAMS)  # which starts JAX
    for first in after:
        with contextlib.chdir(folder / first):
            each = {page: difference(page, names[first], printed[page] if page != first else None) for page in names}
        found[first] = {page: what for page, what in each.items() if what}
        print(f"after {first}: {found[first] or 'all run'}", file=sys.stderr)
    return found


if __name__ == "__main__":
    pages.simulate()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(differences(sys.argv[1:] or WITH_BLOCKS, pathlib.Path(folder))))
