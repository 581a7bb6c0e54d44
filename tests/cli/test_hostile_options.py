"""Every command and every option with hostile, absurd and mistyped values: one line and status 2, or what it does."""

import inspect
import os
import random
import time
import typing

import pytest
from forked import Commands, listing

from jaxshard.apps.commands import bench, generate, tokenize
from jaxshard.apps.commands import eval as evaluate
from jaxshard.apps.commands.arguments import options_of
from jaxshard.apps.config.config import Arguments
from jaxshard.cli.ckpt import command as ckpt
from jaxshard.cli.explain import command as explain
from jaxshard.cli.plan import command as plan

SECONDS = 5.0
HUGE = "9" * 400
TEXTS = [
    "",
    " ",
    "x",
    "true",
    "\0",
    "../..",
    "..",
    ".",
    "~",
    "-",
    "--",
    "[/]",
    "$(touch ran)",
    "\x1b[2J\x07",
    "\u202e",
    "a\nb",
]
TEXTS += [
    "\udcff",
    "\U0001f600" * 20,
    "%s%n",
    "{0.__class__}",
    "'; touch ran;'",
    "a" * 300,
    "a" * 1_000_000,
    "gs://a/b",
]
NUMBERS = [
    "-1",
    "0",
    "-0",
    "1",
    "2147483648",
    "9223372036854775808",
    "1" + "0" * 400,
    "9" * 5000,
    "1.5",
    "nan",
    "inf",
    "-inf",
]
NUMBERS += ["1e308", "-1e308", "1e400", "5e-324", "0x10", "1_000", "٣", "1,5", "1e3", "True", "None"]
FILES = [
    "/dev/zero",
    "/dev/full",
    "/dev/null",
    "/dev/stdin",
    "/proc/self/mem",
    "/",
    "pipe",
    "folder",
    "file",
    "dangling",
]
FILES += ["file/below", "/nonexistent/deep/er", "loop", "socket", "secret:rows", "secret.py:rows"]
VALUES = [*TEXTS, *NUMBERS, *FILES]
NEEDED = {  # what stands before the option
    "train": ["--out", "new"],
    "eval": ["folder"],
    "generate": ["folder"],
    "tokenize": ["file", "--out", "new"],
    "ckpt ls": ["folder"],
    "ckpt info": ["folder"],
    "ckpt verify": ["folder"],
    "ckpt diff": ["folder", "folder"],
    "ckpt export": ["folder"],
}
KINDS = {"train": Arguments, "eval": evaluate.Arguments, "generate": generate.Arguments, "tokenize": tokenize.Arguments}
KINDS |= {"plan": plan.Arguments, "explain": explain.Arguments, "bench": bench.Arguments}
STUBBED = ["train._trained", "bench._run", "doctor._run"]  # after all options were looked at


def options():
    """(command, option or "" for what stands alone)."""
    for command, kind in KINDS.items():
        yield command, ""
        names = [
            *options_of(kind),
            *(name for name in typing.get_type_hints(kind) if name in ("config", "what", "run")),
        ]
        yield from ((command, f"--{name.replace('_', '-')}") for name in names)
    yield from (("doctor", option) for option in ("", "--out", "--seconds", "--json"))
    for name, function in {"ls": ckpt.ls, "info": ckpt.info, "verify": ckpt.verify, "diff": ckpt.diff}.items():
        yield from ((f"ckpt {name}", option) for option in of_function(function))
    yield from (("ckpt export", option) for option in of_function(ckpt.export))
    yield from (("", ""), ("ckpt", ""))


def of_function(function):
    names = inspect.signature(function).parameters
    return ["", *(f"--{name.replace('_', '-')}" for name in names if name not in ("folder", "left", "right"))]


OPTIONS = list(options())


def words_of(command, option, value, form):
    before = [*command.split(), *NEEDED.get(command, ())]
    if not option:
        return [*command.split(), value]
    return {
        "apart": [*before, option, value],
        "joined": [*before, f"{option}={value}"],
        "twice": [*before, option, value, option, value],
        "alone": [*before, option],
    }[form]


@pytest.fixture
def place(tmp_path):
    """A folder with what a value may name."""
    here = tmp_path / "here"
    here.mkdir()
    os.mkfifo(here / "pipe")
    (here / "folder").mkdir()
    (here / "file").write_text("Some text. " * 500)
    (here / "secret.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef rows(): return []\n")
    (here / "dangling").symlink_to("nowhere")
    (here / "loop").symlink_to("loop")
    os.mknod(here / "socket", 0o140600)
    return here


def wrong_with(commands, where, words):
    """What is not as it should be after a command; "" if all is."""
    before = listing(where.parent)
    ended = commands.run(words, where, seconds=60)
    after = listing(where.parent)
    said = ended.err[:300]
    names_code = words[0] in ("explain", "train") and any("secret" in word for word in words)  # the caller typed it
    if "Traceback" in ended.err or ended.status not in (0, 1, 2):
        return f"status {ended.status}, {ended.seconds:.1f} s: {ended.err[-600:]}"
    if after != before and ended.status == 2 and not names_code:
        return f"changed {sorted(set(after.items()) ^ set(before.items()))[:3]}"
    if ended.status == 2 and (ended.err.count("\n") != 1 or not ended.err.endswith("\n")) and words != [""]:
        return f"{ended.err.count(chr(10))} lines: {said}"
    if ended.status == 2 and (not ended.err[:-1].isprintable() or len(ended.err) > 3000):
        return f"{len(ended.err)} characters, printable {ended.err[:-1].isprintable()}: {said[:100]!r}"
    if ended.status == 2 and ended.seconds > SECONDS:
        return f"{ended.seconds:.1f} s: {said}"
    return ""


def tried(place, cases):
    """Runs cases; returns (how often each status came, what was wrong)."""
    wrong, start = [], time.monotonic()
    with Commands(*STUBBED) as commands:
        for words in cases:
            found = wrong_with(commands, place, words)
            if found:
                wrong.append(([word[:40] for word in words], found))
    print(f"{len(cases)} cases, {len(wrong)} wrong, {time.monotonic() - start:.0f} s")
    return wrong


def sample(count, seed, where=OPTIONS):
    chosen = random.Random(seed)
    forms = ["apart", "apart", "joined", "twice", "alone"]
    return [words_of(*chosen.choice(where), chosen.choice(VALUES), chosen.choice(forms)) for _ in range(count)]


def test_some_commands_with_hostile_values(place):
    own = [(command, option) for command, option in OPTIONS if "." not in option]
    assert not tried(place, sample(25, seed=0, where=own))


@pytest.mark.nightly
@pytest.mark.parametrize("command", sorted({command for command, _ in OPTIONS}))
def test_every_option_of_every_command_with_every_hostile_value(place, command):
    mine = [(each, option) for each, option in OPTIONS if each == command]
    cases = [words_of(*one, value, "apart") for one in mine for value in VALUES]
    assert not tried(place, cases + sample(len(cases) // 5, seed=1, where=mine))
