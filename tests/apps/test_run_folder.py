"""The files of a run: what is not the model's state is never in the way, and what was harmed is told."""

import json
import math
import os
import random

import pytest
import tomli_w
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from jaxshard.apps.commands import train_options
from jaxshard.apps.config import seal, toml
from jaxshard.apps.config.checks import check
from jaxshard.apps.config.config import Config, OptimizerConfig, ShardingConfig
from jaxshard.apps.records import record
from jaxshard.apps.runs import metrics
from jaxshard.apps.runs.run_folder import RunFolder

OTHER = Config(optimizer=OptimizerConfig(learning_rate=1e-4), sharding=ShardingConfig(strategy="ddp"))
RECORDS = [{"step": 1, "loss": 5.5, "bits_per_byte": 7.9}, {"step": 2, "loss": 5.25}, {"step": 3, "heldout_loss": 5.0}]
WRITTEN = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()


def kept(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# metrics.jsonl


@pytest.mark.parametrize(
    "line",
    [
        *(b"{}", b"[]", b"3", b"null", b'"step"', b"nan", b'{"loss": 3.5}', b'{"step": "1"}', b'{"step": true}'),
        *(b'{"step": 1.5}', b'{"step": -1}', b'{"step": null}', b'{"step": 1' + b"0" * 400 + b"}", b'{"step": 1}{}'),
        *(b"caf\xe9", b"\xff\xfe", b"\0" * 5000, b"[" * 10**5, b'{"a":' * 10**5, b"9" * 10**5, b"x" * (2**20 + 7)),
    ],
    ids=lambda line: repr(line[:20]),
)
def test_a_line_that_is_no_record_is_kept_elsewhere_and_told(tmp_path, line):
    """Each of them made `--resume` fail."""
    first, *rest = WRITTEN.splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(b"".join([first, line, b"\n", *rest]))
    note = RunFolder(tmp_path).forget_after(9)
    assert kept(tmp_path) == RECORDS
    assert note.endswith("metrics.jsonl: 1 of its lines are not metrics, and are now in metrics.jsonl.others")
    assert (tmp_path / "metrics.jsonl.others").read_bytes().startswith(line[:1000])
    assert RunFolder(tmp_path).forget_after(2) == ""
    assert kept(tmp_path) == RECORDS[:2]


def test_what_a_lost_write_leaves_around_a_record_does_not_matter(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b"\0" * 4096 + WRITTEN + b"\0\0")
    assert "1 of its lines" in RunFolder(tmp_path).forget_after(9)  # the NULs at the end
    assert kept(tmp_path) == RECORDS


def test_the_beginning_of_a_record_is_dropped_in_silence(tmp_path):
    """A kill leaves it; its step comes again."""
    (tmp_path / "metrics.jsonl").write_bytes(WRITTEN + b'{"step": 4, "lo')
    assert RunFolder(tmp_path).forget_after(9) == ""
    assert kept(tmp_path) == RECORDS


def a_folder(path):
    path.mkdir()
    (path / "mine").write_text("precious")


@pytest.mark.parametrize("make", [a_folder, os.mkfifo, lambda path: path.symlink_to("nowhere")])
@pytest.mark.parametrize("name", ["metrics.jsonl", "loss.png", "tensorboard", "config.toml"])
def test_what_is_in_the_way_of_a_file_is_moved_aside(tmp_path, name, make):
    if name == "tensorboard" and make is a_folder:
        make = lambda path: path.write_text("no folder")  # noqa: E731
    for number in ("", "1"):
        if os.path.lexists(tmp_path / name):
            (tmp_path / name).unlink()
        make(tmp_path / name)
        (note,) = RunFolder(tmp_path).begin(toml.dump(OTHER), 0)
        assert f"{name} is " in note
        assert "it is now" in note
        assert os.path.lexists(tmp_path / f"{name}.aside{number}")
    assert toml.load(tmp_path / "config.toml") == OTHER


def test_metrics_that_cannot_be_read_are_moved_aside(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "metrics.jsonl").write_bytes(WRITTEN)
    monkeypatch.setattr(metrics, "read", refuse)
    assert "metrics.jsonl cannot be read (Permission denied): it is now metrics.jsonl.aside" in "".join(
        RunFolder(tmp_path).begin(toml.dump(OTHER), 3)
    )
    assert (tmp_path / "metrics.jsonl.aside").read_bytes() == WRITTEN


@pytest.mark.parametrize(
    "name", ["o$x_$", "$", "$\\frac{$", "x[bold]y", "[red]", "a\nb", "\x1b[2J", "😀 :smile:", "ß", "q" * 200, "\u202e"]
)
def test_the_curves_are_drawn_whatever_the_folder_is_called(tmp_path, monkeypatch, name):
    """`$` began a formula, and the run ended with status 1 after all its steps."""
    folder, drawn = tmp_path / name, []
    folder.mkdir()
    (folder / "metrics.jsonl").write_bytes(
        WRITTEN + b'{"step": 4, "bits_per_byte": "x"}\n{"step": 5, "bits_per_byte": NaN, "heldout_bits_per_byte": []}\n'
        b'{"step": 6, "bits_per_byte": 1' + b"0" * 400 + b"}\n"
    )
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **how: (drawn.append(figure), save(figure, *args, **how))
    )
    record.draw(RunFolder(folder), {"zlib": 2.3})
    assert (folder / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert drawn[0].axes[0].get_title().isprintable()
    assert drawn[0].axes[0].lines[0].get_xdata().tolist() == [1]


def drawn_and_kept(folder, content):
    (folder / "metrics.jsonl").write_bytes(content)
    note = RunFolder(folder).forget_after(5)
    found = kept(folder)
    assert all(type(each["step"]) is int and 0 <= each["step"] <= 5 for each in found)
    for key in ("bits_per_byte", "loss"):
        steps, values = record._curve(found, key)
        assert len(steps) == len(values)
        assert all(map(math.isfinite, values))
    return found, note


def harmed(content, random_of):
    """The bytes with a part lost, zeroed, doubled, or changed."""
    made = bytearray(content)
    for _ in range(random_of.randint(1, 4)):
        at, size = random_of.randrange(len(made) + 1), random_of.choice([0, 1, 2, 30, 200])
        new = random_of.choice(
            [b"", b"\0" * size, b"\n", b"{}\n", b"[]\n", made[at : at + size], random_of.randbytes(size)]
        )
        made[at : at + random_of.choice([0, 1, size])] = new
    return bytes(made)


def check_harmed_metrics(folder, random_of):
    content = harmed(WRITTEN * 3, random_of)
    found, note = drawn_and_kept(folder, content)
    whole = [line for line in content.split(b"\n")[:-1] if line + b"\n" in WRITTEN.splitlines(keepends=True)]
    assert len(found) >= len(whole)  # what is whole is kept
    lines = [line for line in content.split(b"\n")[:-1] if line.strip() and metrics.record_in(line) is None]
    assert bool(note) >= bool(lines)  # what is dropped is told


@settings(max_examples=200, deadline=None)
@given(random_of=st.randoms(use_true_random=False))
def test_harmed_metrics(tmp_path_factory, random_of):
    check_harmed_metrics(tmp_path_factory.getbasetemp(), random_of)


@pytest.mark.nightly
def test_10_000_harmed_metrics(tmp_path):
    for seed in range(10_000):
        check_harmed_metrics(tmp_path, random.Random(seed))


# config.toml

SEALED = seal.sealed(toml.dump(OTHER))


def begun(tmp_path, text):
    (tmp_path / "config.toml").write_text(text)
    return RunFolder(tmp_path)


@pytest.mark.parametrize("number", range(len(SEALED.splitlines())))
def test_a_configuration_that_was_cut_short_is_an_error(tmp_path, number):
    """Cut where a line ends it is TOML: the defaults came back in silence, lr 3e-3 for 1e-4 and zero2 for ddp."""
    folder = begun(tmp_path, "".join(SEALED.splitlines(keepends=True)[:number]))
    with pytest.raises(ValueError, match=r"is truncated.*; give the file that has its options: jaxshard train CONFIG"):
        train_options._check_own(folder)
    if number:
        with pytest.raises(ValueError, match="is truncated"):
            toml.load(folder.config)  # nor is it taken where it is named


def test_a_configuration_of_an_older_jaxshard_is_read_and_what_it_lacks_is_told(tmp_path):
    text = toml.dump(OTHER)
    assert train_options._check_own(begun(tmp_path, text)) == []
    older = text.replace("heartbeat_seconds = 60\n", "").replace("mend_copies = false\n", "")
    (note,) = train_options._check_own(begun(tmp_path, older))
    assert "lacks train.mend_copies, train.heartbeat_seconds: an older jaxshard wrote it" in note
    with pytest.raises(ValueError, match=r"is truncated: it lacks the section \[train\]"):
        train_options._check_own(begun(tmp_path, text.partition("[train]")[0]))


def test_a_configuration_that_was_edited_is_taken_once_it_is_named(tmp_path):
    folder = begun(tmp_path, SEALED.replace("steps = 400", "steps = 800"))
    with pytest.raises(
        ValueError, match="was changed after the run wrote it; if you changed it yourself, give the file"
    ) as raised:
        train_options._check_own(folder)
    assert f"jaxshard train {folder.config} --resume --out {tmp_path}" in str(raised.value)
    assert toml.load(folder.config).train.steps == 800


def test_line_ends_of_windows_are_no_edit(tmp_path):
    (tmp_path / "config.toml").write_bytes(SEALED.replace("\n", "\r\n").encode())
    assert train_options._check_own(RunFolder(tmp_path)) == []


def check_harmed_configuration(folder, random_of):
    (folder / "config.toml").write_bytes(harmed(SEALED.encode(), random_of))
    try:
        notes = train_options._check_own(RunFolder(folder))
        config = toml.load(folder / "config.toml")
    except ValueError as refused:
        error = refused
    else:
        error = None
    assert str(folder) in str(error) if error else notes or config == OTHER


@settings(max_examples=200, deadline=None)
@given(random_of=st.randoms(use_true_random=False))
def test_a_harmed_configuration_never_becomes_another_in_silence(tmp_path_factory, random_of):
    check_harmed_configuration(tmp_path_factory.getbasetemp(), random_of)


@pytest.mark.nightly
def test_10_000_harmed_configurations(tmp_path):
    for seed in range(10_000):
        check_harmed_configuration(tmp_path, random.Random(seed))


VALUES = st.recursive(
    st.one_of(
        st.integers(-(10**400), 10**400), st.sampled_from([0, -1, 2**31, 2**63, 10**400, "", "\0", True]), st.floats(),
        st.booleans(), st.text(st.characters(codec="utf-8"), max_size=20), st.dates(), st.datetimes(), st.times(),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", min_size=1), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
KEYS = st.one_of(st.sampled_from([*toml.known_keys(), "data", "train"]), st.text("adt.", max_size=5))


def check_configuration_of_any_values(folder, changes):
    tables = {name: dict(vars(section)) for name, section in vars(Config()).items()}
    for key, value in changes:
        section, _, name = key.partition(".")
        if name and isinstance(tables.setdefault(section, {}), dict):
            tables[section][name] = value
        else:
            tables[section] = value
    tables = {
        name: {k: v for k, v in table.items() if v is not None} if isinstance(table, dict) else table
        for name, table in tables.items()
    }
    (folder / "config.toml").write_text(tomli_w.dumps(tables), encoding="utf-8")
    try:
        config = toml.load(folder / "config.toml")
        check(config)
    except ValueError as refused:
        error = str(refused)
    else:
        error = ""
    assert len(error) < 5000
    if not error:
        for key, value in changes:
            section, _, name = key.partition(".")
            if section in tables and (section, name, value) == (section, name, tables[section].get(name)):
                assert getattr(getattr(config, section), name) == (tuple(value) if isinstance(value, list) else value)


CHANGES = st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=3)


@settings(max_examples=200, deadline=None)
@given(changes=CHANGES)
@example(changes=[("train.log_to", [])])
def test_a_configuration_of_any_values_is_right_or_refused(tmp_path_factory, changes):
    check_configuration_of_any_values(tmp_path_factory.getbasetemp(), changes)


@pytest.mark.nightly
def test_10_000_configurations_of_any_values(tmp_path):
    @settings(max_examples=10_000, deadline=None)
    @given(changes=CHANGES)
    def check(changes):
        check_configuration_of_any_values(tmp_path, changes)

    check()
