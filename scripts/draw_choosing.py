"""Draws the decision tree of docs/choosing.md: `python scripts/draw_choosing.py` writes docs/choosing.svg.

The drawing is 400 units wide, so that a phone shows it at full size: questions on the left, one below the other; the
strategy for a yes on the right.
"""

import pathlib
import textwrap
from collections.abc import Iterator
from html import escape

PICTURE = pathlib.Path(__file__).parents[1] / "docs" / "choosing.svg"
TITLE = "Decision tree: which strategy to use"

# (question, the answer if yes); the last entry applies if every answer is no.
STEPS = [
    ("Is most of the model frozen (LoRA, QLoRA)?", "zero3\nfrozen=[...]"),
    ("Does a step have fewer examples than devices?", "hybrid\ntensor in a node,\nzero=3 across nodes"),
    ("Several nodes: do params + gradients fit when sharded over one node?", "hsdp\nstate_axes=\n(data, replica)"),
    ("Several nodes, and they do not fit in one?", "hybrid\ntensor in a node,\nzero=3 across nodes"),
    ("Do full params and gradients fit on each device?", "zero1"),
    ("Do full params fit on each device?", "zero2"),
    ("Does everything fit when sharded over all devices?", "zero3"),
    ("Nothing fits:", "8-bit moments,\nstate on the host,\ntensor, pipeline"),
]

WIDTH, MARGIN, GAP = 400, 8, 26
QUESTION, ANSWER = 186, 162  # widths
LINE, PADDING, LETTERS = 18, 11, 22  # height of a line, space around a text, characters of a question's line
STYLE = 'stroke="#607080" stroke-width="1.5" fill="none" marker-end="url(#tip)"'


def svg() -> str:
    """The drawing, as text."""
    boxes, height = [], MARGIN
    for index, (question, answer) in enumerate(STEPS):
        lines, results = textwrap.wrap(question, LETTERS), answer.split("\n")
        tall = LINE * max(len(lines), len(results)) + 2 * PADDING
        boxes += _row(lines, results, height, tall, is_last=index == len(STEPS) - 1)
        height += tall + GAP
    height += MARGIN - GAP
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        'font-family="sans-serif" font-size="14">',
        f"<title>{TITLE}</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#607080"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    return "\n".join([*head, *boxes, "</svg>"]) + "\n"


def _row(lines: list[str], results: list[str], y: int, tall: int, *, is_last: bool) -> Iterator[str]:
    """A question, its answer, and the arrows from the question to the answer and to the next question."""
    right, middle = WIDTH - MARGIN - ANSWER, y + tall // 2
    yield from _box(lines, MARGIN, y, QUESTION, tall, fill="#fdf3d8", weights=["normal"] * len(lines))
    bold = ["normal"] * len(results) if is_last else ["bold", *["normal"] * (len(results) - 1)]
    yield from _box(results, right, y, ANSWER, tall, fill="#dcebf7", weights=bold)
    yield f'<path d="M{MARGIN + QUESTION} {middle}H{right - 1}" {STYLE}/>'
    if not is_last:
        yield f'<text x="{MARGIN + QUESTION + 4}" y="{middle - 5}" fill="#34495e">yes</text>'
        x = MARGIN + QUESTION // 2
        yield f'<path d="M{x} {y + tall}V{y + tall + GAP - 1}" {STYLE}/>'
        yield f'<text x="{x + 8}" y="{y + tall + 17}" fill="#34495e">no</text>'


def _box(lines: list[str], x: int, y: int, wide: int, tall: int, *, fill: str, weights: list[str]) -> Iterator[str]:
    yield f'<rect x="{x}" y="{y}" width="{wide}" height="{tall}" rx="6" fill="{fill}" stroke="#34495e"/>'
    top = y + (tall - LINE * len(lines)) // 2 + 14
    for index, (line, weight) in enumerate(zip(lines, weights, strict=True)):
        place = f'x="{x + wide // 2}" y="{top + LINE * index}" text-anchor="middle" font-weight="{weight}"'
        yield f"<text {place}>{escape(line)}</text>"


if __name__ == "__main__":
    PICTURE.write_text(svg())
