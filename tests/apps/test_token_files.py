"""Files of tokens: read in place, in one order, with nanoGPT's and llm.c's ways of writing them."""

import errno
import json
import os
import tracemalloc

import numpy as np
import pytest

from jaxshard.apps.commands.train import command
from jaxshard.apps.config.config import DataConfig
from jaxshard.apps.data import data, token_file, token_files
from jaxshard.apps.data.batches import TrainingBatches
from jaxshard.apps.data.token_file import TextError

TOKENS = np.random.default_rng(0).integers(0, 500, 5000)


def written(path, tokens, dtype="<u2", magic=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    header = np.zeros(256, "<i4")
    if magic:
        header[:3] = magic, 1, len(tokens)
    path.write_bytes((header.tobytes() if magic else b"") + np.asarray(tokens, dtype).tobytes())
    return str(path)


def read(path, length=16, vocabulary=512, **options):
    return data.read(DataConfig(path=path, **options), length, vocabulary)


def everything(text):
    return text.rows([0], len(text))[0] if isinstance(text, token_files.TokenFiles) else text


KINDS = {
    "nanoGPT": ({}, {}),
    "uint32": ({"dtype": "<u4"}, {"format": "uint32"}),
    "llm.c": ({"magic": 20240520}, {}),
    "llm.c, Llama 3": ({"dtype": "<u4", "magic": 20240801}, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_come_as_they_were_written(kind, tmp_path):
    how, options = KINDS[kind]
    text = read(written(tmp_path / "train.bin", TOKENS, **how), **options)
    assert not text.is_bytes
    np.testing.assert_array_equal(np.concatenate([everything(text.train), text.heldout]), TOKENS)
    assert len(text.heldout) == 500


def test_a_folder_has_its_own_heldout_files(tmp_path):
    for name, part in {
        "a_train_0.bin": TOKENS[:900],
        "a_train_1.bin": TOKENS[900:3000],
        "a_val.bin": TOKENS[4000:],
    }.items():
        written(tmp_path / name, part)
    text = read(str(tmp_path))
    np.testing.assert_array_equal(everything(text.train), TOKENS[:3000])
    np.testing.assert_array_equal(text.heldout, TOKENS[4000:])
    apart = read(written(tmp_path / "b" / "x.bin", TOKENS), heldout_path=str(tmp_path / "a_val.bin"))
    assert len(apart.train) == 5000
    np.testing.assert_array_equal(apart.heldout, TOKENS[4000:])
    assert text.fingerprint != apart.fingerprint


def test_a_folder_of_files_that_all_have_val_in_their_names_is_trained_on(tmp_path):
    for i, part in enumerate(np.split(TOKENS, 2)):
        written(tmp_path / f"val_{i}.bin", part)
    text = read(str(tmp_path))
    np.testing.assert_array_equal(np.concatenate([everything(text.train), text.heldout]), TOKENS)


def test_several_files_are_as_one(tmp_path):
    one = read(written(tmp_path / "one" / "x.bin", TOKENS)).train
    for i, part in enumerate(np.split(TOKENS, [1, 700, 4321])):
        written(tmp_path / "several" / f"{i}.bin", part)
    several = read(str(tmp_path / "several")).train
    for step in range(40):
        rows = [TrainingBatches(text, 4, 16, seed=3)(step)["tokens"] for text in (one, several)]
        np.testing.assert_array_equal(*rows)
        assert rows[0].dtype == np.int32


def test_a_file_is_never_held_whole_in_memory(tmp_path):
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(2**30)  # a sparse file
    held = written(tmp_path / "held.bin", TOKENS)
    tracemalloc.start()
    try:
        text = read(str(path), heldout_path=held)
        assert len(text.train) == 2**29
        assert text.train.rows([2**29 - 1], 1) == 0
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()


WRONG = {
    "odd": (b"abc", {}, "has 3 bytes of tokens, not a multiple of 2, the size of uint16: it is truncated, or is text"),
    "large token": (
        np.where(np.arange(300) < 7, 511, 600).astype("<u2").tobytes(),
        {},
        "x.bin, token 7), and model.vocabulary = 512: set it to 601",
    ),
    "short": (np.zeros(9, "<u2").tobytes(), {}, "data.path has 9 tokens, and a sequence needs more than"),
    "empty": (b"", {}, "has 0 tokens"),
    "header of others": (
        np.asarray([20240520, 1, 100, *[0] * 253], "<i4").tobytes() + bytes(200),
        {"format": "uint32"},
        "data.format = uint32: ",
    ),
    "cut short": (
        np.asarray([20240520, 1, 100, *[0] * 253], "<i4").tobytes() + bytes(190),
        {},
        "holds 95 tokens, and its header says 100: copy it again",
    ),
    "no heldout": (
        np.zeros(100, "<u2").tobytes(),
        {"heldout_path": "nowhere"},
        "data.heldout_path: 'nowhere' does not",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_told(name, tmp_path):
    content, options, words = WRONG[name]
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"data|text") as error:
        read(str(tmp_path / "x.bin"), **options)
    assert words in str(error.value)


def test_files_of_two_types_are_told(tmp_path):
    written(tmp_path / "a.bin", TOKENS, magic=20240520)
    written(tmp_path / "b.bin", TOKENS, "<u4", magic=20240801)
    with pytest.raises(ValueError, match="the files hold tokens of different types"):
        read(str(tmp_path))


def test_a_heldout_path_of_text_is_named_where_it_is_wrong(tmp_path):
    (tmp_path / "text").write_text("some text " * 99)
    with pytest.raises(ValueError, match=r"^data\.heldout_path: 'nowhere' does not exist"):
        read(str(tmp_path / "text"), heldout_path="nowhere")


def test_bin_files_can_be_text(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(b"text " * 100)
    assert read(str(path), format="bytes").is_bytes
    path.rename(tmp_path / "x.txt")
    assert read(str(tmp_path / "x.txt")).is_bytes


SMALL = [
    "--model.layers",
    "1",
    "--model.width",
    "16",
    "--model.heads",
    "2",
    "--model.hidden",
    "32",
    "--train.rows",
    "8",
]
SMALL += ["--model.sequence-length", "16", "--model.vocabulary", "512", "--train.log-every", "1"]


def test_a_run_is_resumed_bit_for_bit(tmp_path, capfd):
    path = written(tmp_path / "train.bin", TOKENS)
    options = [*SMALL, "--data", path, "--train.seed", "5"]
    assert command([*options, "--out", str(tmp_path / "whole"), "--train.steps", "6"]) == 0
    out = capfd.readouterr().out
    assert "uint16 tokens to train on" in out
    assert "nats/token" in out
    assert "zlib" not in out
    assert command([*options, "--out", str(tmp_path / "parts"), "--train.steps", "6", "--train.save-every", "3"]) == 0
    lines = [(tmp_path / run / "metrics.jsonl").read_text().splitlines() for run in ("whole", "parts")]
    losses = [[json.loads(line)["loss"] for line in some if '"loss"' in line] for some in lines]
    assert losses[0] == losses[1]
    assert "bits_per_byte" not in lines[0][0]


def test_every_token_is_compared_with_the_vocabulary_before_anything_is_compiled(tmp_path, capfd):
    """Samples missed one of these in most files; the run then ended in the middle."""
    tokens = np.arange(2_000_000) % 500
    tokens[1_234_567] = 600
    options = [*SMALL, "--data", written(tmp_path / "train.bin", tokens), "--out", str(tmp_path / "run")]
    assert command(options) == 2
    assert f"the text has the token 600 ({tmp_path}/train.bin, token 1,234,567)" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_fingerprint_sees_every_byte(tmp_path):
    """Of this file, 90% could be replaced between the samples."""
    path, tokens = tmp_path / "train.bin", np.zeros(40_000_000, "<u2")
    tokens.tofile(path)
    first = read(str(path))
    step = (len(tokens) - 2**15) // 63
    tokens[2**15 : step] = 1  # between the first sample and the second
    tokens.tofile(path)
    other = read(str(path))
    assert first.older_fingerprint is not None
    assert first.fingerprint != other.fingerprint
    for place in (0, 12_345_678, len(tokens) - 1):
        tokens[:] = 0
        tokens[place] = 1
        tokens.tofile(path)
        assert read(str(path)).fingerprint != first.fingerprint


def test_a_run_that_an_older_jaxshard_saved_goes_on_where_it_was(tmp_path, monkeypatch, capfd):
    path = written(tmp_path / "train.bin", TOKENS)
    options = [*SMALL, "--data", path, "--out", str(tmp_path / "run"), "--train.steps"]
    with monkeypatch.context() as older:
        older.setattr(token_files, "fingerprint", token_files.sampled_fingerprint)
        assert command([*options, "3"]) == 0
    capfd.readouterr()
    assert command([*options, "5", "--resume"]) == 0
    out = capfd.readouterr().out
    assert "an older jaxshard saved this run: its checksum of the text, which covers samples only, matches" in out
    assert "from its beginning" not in out
    assert command([*options, "6", "--resume"]) == 0
    assert "an older jaxshard saved" not in capfd.readouterr().out


def changed(path, how):
    """What happens to a file of tokens, while it is read."""
    whole = path.read_bytes()
    if how == "cut":
        os.truncate(path, 100)
    elif how == "empty":
        os.truncate(path, 0)
    elif how == "written over":
        with path.open("r+b") as file:
            file.write(np.full(len(whole) // 2, 3, "<u2").tobytes())
    elif how == "out of range":
        with path.open("r+b") as file:
            file.write(np.full(len(whole) // 2, 60_000, "<u2").tobytes())
    elif how == "replaced":
        path.with_name("new").write_bytes(whole[::-1])
        path.with_name("new").replace(path)
    elif how == "replaced by the same":
        path.with_name("new").write_bytes(whole)
        path.with_name("new").replace(path)
    elif how == "touched":
        os.utime(path, ns=(1, 1))
    elif how == "appended":
        with path.open("ab") as file:
            file.write(whole)
    elif how == "deleted":
        path.unlink()
    elif how == "a pipe":
        path.unlink()
        os.mkfifo(path)
    elif how == "a folder":
        path.unlink()
        path.mkdir()
    elif how == "a link to nothing":
        path.unlink()
        path.symlink_to("nothing")


CHANGES = {
    "cut": "was truncated during the run: it has 100 bytes, and had 10,000",
    "empty": "was truncated during the run: it has 0 bytes, and had 10,000",
    "written over": "was changed during the run",
    "out of range": "was changed during the run",
    "replaced": "was changed during the run",
    "deleted": "it cannot be read any more: No such file",
    "a pipe": "it cannot be read any more: Illegal seek",
    "a folder": "it cannot be read any more: Is a directory",
    "a link to nothing": "it cannot be read any more: No such file",
}
HARMLESS = ["replaced by the same", "touched", "appended"]


@pytest.mark.parametrize("how", CHANGES)
def test_a_file_that_changes_while_it_is_read_is_an_error(how, tmp_path, monkeypatch):
    """Mapped, a file that was cut short ended the program by SIGBUS; all others went unseen."""
    monkeypatch.setattr(token_file, "_PAUSES", (0.01,))
    path = tmp_path / "train.bin"
    batches = TrainingBatches(read(written(path, TOKENS)).train, 4, 16, seed=3)
    batches(0)
    changed(path, how)
    with pytest.raises(TextError) as error:
        list(map(batches, range(1, 30)))
    assert str(path) in str(error.value)
    assert CHANGES[how] in str(error.value)


@pytest.mark.parametrize("how", HARMLESS)
def test_a_file_whose_tokens_stay_the_same_is_read_on_with_one_warning(how, tmp_path, recwarn):
    path = tmp_path / "train.bin"
    text = read(written(path, TOKENS))
    changed(path, how)
    np.testing.assert_array_equal(np.concatenate([everything(text.train), text.heldout]), TOKENS)
    everything(text.train)
    (warning,) = recwarn
    wanted = "train.bin was replaced, written to or touched during the run; the tokens are the same"
    assert wanted in str(warning.message)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES])
def test_one_read_that_fails_is_tried_again(number, tmp_path, monkeypatch):
    monkeypatch.setattr(token_file, "_PAUSES", (0.01,))
    text, calls, pread = read(written(tmp_path / "train.bin", TOKENS)), [], os.pread

    def failing(*arguments):
        calls.append(number)
        if len(calls) <= failures:
            raise OSError(number, os.strerror(number))
        return pread(*arguments)

    monkeypatch.setattr(os, "pread", failing)
    failures = 1
    np.testing.assert_array_equal(text.train.rows([5], 20)[0], TOKENS[5:25])
    calls, failures = [], 99
    with pytest.raises(TextError, match=os.strerror(number)):
        text.train.rows([5], 20)


def test_tokens_of_32_bits_that_become_negative_are_out_of_range():
    tokens = np.asarray([[1, 2, 3], [4, 2**32 - 1, 5]], "<u4").astype(np.int32)
    assert "(place 4)" in token_files.out_of_range(tokens, 512, lambda index: f"place {index}")
    assert token_files.out_of_range(tokens[:1], 512, str) is None
