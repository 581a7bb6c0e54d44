"""Every option with every kind of wrong value: status 2 and one line, or a run. Nothing is written, or large."""

import random
import resource

import pytest
from clock import at_most

from jaxshard.apps.commands import train
from jaxshard.apps.commands.arguments import options_of
from jaxshard.apps.config.config import Arguments
from jaxshard.cli import main

VALUES = [
    *("0", "-1", str(2**31 - 1), str(2**31), str(2**63 - 1), str(2**63), str(10**400), "9" * 5000, "8e12", "1.5"),
    *("nan", "inf", "-inf", "1e400", "5e-324", "1e-300", "", "x", "true", "0x10", "1_000", "٣", "\x1b[2J", "[/]", "$"),
]
OPTIONS = {name: kind for name, kind in options_of(Arguments).items() if name not in ("config", "out", "data.path")}


def check_option(tmp_path, capsys, name, value):
    option = f"--{name.replace('_', '-')}"
    given = [f"{option}={value}"] if OPTIONS[name] is bool else [option, value]
    with at_most(30):
        try:
            status = main(["train", *given, "--out", "here"])
        except SystemExit as end:
            status = end.code
        error = capsys.readouterr().err
        assert status in (0, 2), (name, value, error)
        assert error.count("\n") == (status == 2), (name, value, error)
        assert error.replace("\n", "").isprintable()
        assert len(error) < 600
        assert list(tmp_path.iterdir()) == []


@pytest.fixture
def checked(tmp_path, monkeypatch, capsys):
    """Runs end where all is checked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "_trained", lambda job: 0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield lambda name, value: check_option(tmp_path, capsys, name, value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 2**20  # 1 GiB, in KiB


def test_some_options_with_wrong_values(checked):
    random_of = random.Random(0)
    for name in sorted(OPTIONS):
        checked(name, random_of.choice(VALUES))


@pytest.mark.nightly
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_with_wrong_values(checked, name):
    for value in VALUES:
        checked(name, value)


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--out", "gs://bucket/run"],
        ["train", "--out=s3://bucket/run"],
        ["train", "gs://bucket/run.toml", "--out", "here"],
        ["eval", "gs://bucket/run"],
        ["generate", "file:///run"],
        ["tokenize", "text", "--out", "gs://bucket/tokens"],
        ["doctor", "--out", "gs://bucket"],
        ["plan", "--json", "https://host/plan.json"],
    ],
)
def test_a_url_is_no_folder(tmp_path, monkeypatch, capsys, words):
    """It became a local folder "gs:/bucket", in silence."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("words")
    try:
        status = main(words)
    except SystemExit as end:
        status = end.code
    error = capsys.readouterr().err
    assert (status, error.count("\n")) == (2, 1), error
    assert "is not a local path: mount the bucket" in error
    assert [path.name for path in tmp_path.iterdir()] == ["text"]
