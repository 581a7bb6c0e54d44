"""Help: one look for all commands, wrapped once at the terminal's width, each default where it is one."""

import dataclasses
import itertools
import re

import pytest

from jaxshard.apps.commands.arguments import options_of
from jaxshard.apps.config.config import Arguments
from jaxshard.cli import COMMANDS, main
from jaxshard.cli.ckpt.command import COMMANDS as OF_CKPT
from jaxshard.cli.plan import command as plan

PAGES = [[], *([name] for name in COMMANDS), *(["ckpt", name] for name in OF_CKPT)]


@pytest.fixture
def helped(monkeypatch, capsys):
    def page(*words, width=100):
        monkeypatch.setenv("COLUMNS", str(width))
        try:
            status = main([*words, "--help"])
        except SystemExit as end:
            status = end.code
        printed = capsys.readouterr()
        assert (status, printed.err) == (0, "")
        return printed.out

    return page


def words_of(text):
    return text.split()


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_every_page_has_one_look_and_is_wrapped_at_the_terminals_width(helped, words):
    wide, page, narrow = helped(*words, width=400), helped(*words), helped(*words, width=60)
    assert re.match(rf"usage: {' '.join(['jaxshard', *words])}\b", page)
    assert words_of(wide) == words_of(page) == words_of(narrow)
    for text, width in ((wide, 400), (page, 100), (narrow, 60)):
        for line in text.splitlines():
            assert re.match(r"|[^ ]|  [^ ]|      [^ ]|          [^ ]", line), line
            assert len(line) <= width or line.strip().count(" ") <= 1, line
    lines = page.splitlines()
    for line, after in itertools.pairwise(lines):  # wrapped once: no line breaks where a word had room
        indent = len(line) - len(line.lstrip())
        if line and after and indent == len(after) - len(after.lstrip()) == 10:
            assert len(line) + 1 + len(after.split()[0]) > 100, (line, after)
    assert "\noptions:\n" in page
    assert "-h, --help\n" in page


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_a_default_is_shown_once_and_only_where_it_is_one(helped, words):
    page = " ".join(helped(*words, width=400).split())
    assert "None" not in page
    assert "default: )" not in page
    assert "default: '')" not in page
    for row in re.split(r" (?=--[a-z])", page):
        assert len(re.findall(r"default", row.partition("(default: ")[0])) <= 1 or "(default: " not in row
    assert not re.search(r"[Bb]y default[^.]*\. ?\(default: ", page)


def test_every_option_of_training_is_shown_with_its_text(helped):
    page = helped("train")
    for name in options_of(Arguments):
        assert re.search(rf"^  .*--{re.escape(name.replace('_', '-'))}\b.*\n          [A-Za-z0-9]", page, re.M), name
    text = "Highest learning rate, reached after the warm-up. (default: 0.003)"
    assert f"--optimizer.learning-rate FLOAT\n          {text}\n" in page
    assert "--model.remat, --model.no-remat\n" in page
    assert "(default: on)" in helped("train", width=400)
    assert "--dtype {float32,bfloat16,float16}\n" in helped("ckpt", "export")
    assert "Presets: beat_zlib, ddp, default, " in page


@pytest.mark.parametrize("name", ["plan", "explain"])
def test_a_plan_shows_no_option_that_it_does_not_read(helped, name):
    page = helped(name)
    shown = set(re.findall(r"--((?:data|train)[.\w-]*)", page))
    assert shown == {"train.steps", "train.rows", "train.start"}
    assert "--model.layers" in page
    assert "ignores" in page


def test_what_a_plan_leaves_out_changes_no_figure(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plan, "_planned", lambda given: kept.append(given) or 0)
    kept = []
    for option in ("--train.log-every=3", "--train.keep-best=2", "--data.heldout=0.2", "--train.seed=5"):
        assert main(["plan", option]) == 0
    rest = [dataclasses.replace(each, data=kept[0].data, train=kept[0].train) for each in kept]
    assert rest == [kept[0]] * len(rest)


def test_a_mistyped_command_ends_with_one_line_and_a_suggestion(capsys):
    assert main(["trian"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "jaxshard: no command 'trian'; did you mean 'train'? (jaxshard --help)\n"
    assert main(["ckpt", "lst"]) == 2
    assert capsys.readouterr().err == "jaxshard ckpt: no command 'lst'; did you mean 'ls'? (jaxshard ckpt --help)\n"
    assert main(["qqqq"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"no command 'qqqq'; the commands are {', '.join(COMMANDS)} (jaxshard --help)")
