"""docs/choosing.md: its drawing is the script's, and names strategies that there are and that the page tells."""

import importlib.util
import re

from pages import PAGES, ROOT

import jaxshard

SPEC = importlib.util.spec_from_file_location("draw_choosing", ROOT / "scripts" / "draw_choosing.py")
draw_choosing = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(draw_choosing)
MOST_LETTERS = 20  # of an answer's line: more would leave its box in a wide font


def test_the_drawing_is_the_scripts():
    """Where this fails: `python scripts/draw_choosing.py`."""
    assert draw_choosing.PICTURE.read_text() == draw_choosing.svg()


def test_answers_are_strategies_that_the_page_tells():
    page = PAGES["docs/choosing.md"].read_text()
    named = [answer.split("\n")[0] for _, answer in draw_choosing.STEPS[:-1]]
    assert len(set(named)) == 5
    for name in named:
        assert name in jaxshard.__all__
        assert re.search(rf"`{name}[`(]", page), name


def test_text_stays_within_its_box():
    assert all(len(line) <= MOST_LETTERS for _, answer in draw_choosing.STEPS for line in answer.split("\n"))
    assert all(len(word) <= draw_choosing.LETTERS for question, _ in draw_choosing.STEPS for word in question.split())
