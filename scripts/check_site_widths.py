"""Looks at the built site in a browser: `python scripts/check_site_widths.py docs/_build/html`.

It is run by hand, since it needs a browser: `pip install playwright`, and `playwright install chromium` or
`--browser /usr/bin/chromium`. On a screen of 1400 px no block of code may need a scrollbar, and the contents beside the
page fit. On a screen of 400 px no page may be wider than the screen. On both, code in a sentence or a table breaks only
at a space or after `.`, `_` or `(`, and a word of a table breaks nowhere. `--pictures FOLDER` also writes a picture of
each page, light and dark. It prints what is wrong, and exits with 1 if anything is.
"""

import argparse
import pathlib
import sys
from collections.abc import Iterator

from playwright.sync_api import Page, sync_playwright

LEFT_OUT = {"genindex.html", "py-modindex.html", "search.html"}
WIDE, NARROW = 1400, 400

# What is wrong on the page that is shown, as lines of text.
LOOK = r"""
([wide, width]) => {
  const found = [];
  const start = (text) => text.trim().replace(/\s+/g, " ").slice(0, 70);
  const article = document.querySelector("article") || document.body;
  const shown = (element) => element.getClientRects().length > 0;

  if (document.documentElement.scrollWidth > width)
    found.push(`the page is ${document.documentElement.scrollWidth} px wide`);

  for (const pre of article.querySelectorAll("pre"))
    if (wide && shown(pre) && pre.scrollWidth > pre.clientWidth) {
      const longest = pre.textContent.split("\n").reduce((a, b) => (b.length > a.length ? b : a));
      const excess = pre.scrollWidth - pre.clientWidth;
      found.push(`a block is ${excess} px too wide, ${longest.length} columns: ${start(longest)}`);
    }

  const contents = document.querySelector(".bd-sidebar-secondary");
  if (wide && contents && shown(contents) && contents.scrollWidth > contents.clientWidth)
    found.push(`the contents are ${contents.scrollWidth - contents.clientWidth} px too wide`);

  const top = (node, i) => {
    const range = document.createRange();
    range.setStart(node, i);
    range.setEnd(node, i + 1);
    const box = range.getClientRects()[0];
    return box && box.width ? box.top : null;
  };
  const breaks = function* (node) {
    const range = document.createRange();
    range.selectNodeContents(node);
    if (range.getClientRects().length < 2) return;
    for (let i = 1, above = top(node, 0); i < node.length; i++) {
      const here = top(node, i);
      if (above !== null && here !== null && here - above > 4) yield i;
      above = here;
    }
  };
  const walker = document.createTreeWalker(article, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode()); ) {
    const parent = node.parentElement;
    if (!parent.closest("code, td, th, dt.sig") || parent.closest("pre, script, style, svg, mjx-container")) continue;
    const code = parent.closest("code, dt.sig");
    for (const i of breaks(node)) {
      const [before, after] = [node.data[i - 1], node.data[i]];
      if (code ? /[\s._(]/.test(before) : !/\w/.test(before) || !/\w/.test(after)) continue;
      const [left, right] = [node.data.slice(Math.max(0, i - 30), i), node.data.slice(i, i + 30)];
      found.push(`broken inside a word: ${start(left)}|${start(right)}`);
    }
  }
  return found;
}
"""


def looked_at(page: Page, address: str, theme: str) -> None:
    """Opens a page in a theme, and waits for its fonts and formulas."""
    page.add_init_script(f"localStorage.setItem('mode', '{theme}'); localStorage.setItem('theme', '{theme}')")
    page.goto(address, wait_until="load")
    page.evaluate("() => document.fonts.ready")


def wrong(page: Page, width: int) -> Iterator[str]:
    yield from dict.fromkeys(page.evaluate(LOOK, [width == WIDE, width]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=pathlib.Path)
    parser.add_argument("--browser", help="a Chromium; that of `playwright install` without it")
    parser.add_argument("--pictures", type=pathlib.Path, help="a folder for a picture of each page")
    parser.add_argument("--only", default="", help="pages whose path contains this")
    options = parser.parse_args()
    site = options.site.resolve()
    pages = [path for path in sorted(site.rglob("*.html")) if not path.relative_to(site).parts[0].startswith("_")]
    pages = [path for path in pages if path.name not in LEFT_OUT and options.only in str(path.relative_to(site))]
    num_wrong = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.browser, args=["--no-sandbox"])
        for width in (WIDE, NARROW):
            for theme in ("light", "dark") if options.pictures else ("light",):
                context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
                page = context.new_page()
                for path in pages:
                    name = path.relative_to(site).with_suffix("")
                    looked_at(page, path.as_uri(), theme)
                    for line in wrong(page, width) if theme == "light" else ():
                        num_wrong += 1
                        print(f"{name} at {width} px: {line}")
                    if options.pictures:
                        picture = options.pictures / f"{str(name).replace('/', '.')}-{width}-{theme}.png"
                        page.screenshot(path=picture, full_page=True)
                context.close()
        browser.close()
    print(f"{len(pages)} pages at {WIDE} and {NARROW} px: {num_wrong or 'nothing'} wrong")
    return num_wrong > 0


if __name__ == "__main__":
    sys.exit(main())
