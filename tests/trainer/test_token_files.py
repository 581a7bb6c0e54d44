"""Files of tokens: read in place, in one order, with nanoGPT's and llm.c's ways of writing them."""

import json

import numpy as np
import pytest

from jaxshard.cli.train import command
from jaxshard.trainer import data, token_files
from jaxshard.trainer.config import DataConfig

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
    return text[np.arange(len(text))] if isinstance(text, token_files.TokenFiles) else text


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
        rows = [data.TrainingBatches(text, 4, 16, seed=3)(step)["tokens"] for text in (one, several)]
        np.testing.assert_array_equal(*rows)
        assert rows[0].dtype == np.int32


def test_a_larger_file_than_memory_is_not_read(tmp_path):
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(2**40)  # a sparse file
    text = read(str(path), heldout_path=written(tmp_path / "held.bin", TOKENS))
    assert len(text.train) == 2**39
    assert text.train[np.asarray([2**39 - 1])] == 0


WRONG = {
    "odd": (b"abc", {}, "has 3 bytes of tokens, no multiple of 2, the size of uint16: it was cut short, or is text"),
    "large token": (np.full(300, 600, "<u2").tobytes(), {}, "the text has the token 600, and model.vocabulary = 512"),
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
        "holds 95 tokens, and its header says 100: copy it anew",
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


def test_a_token_out_of_the_vocabulary_is_told_where_no_sample_saw_it(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(token_files, "_SAMPLE_TOKENS", 1)
    path = written(tmp_path / "train.bin", np.where(np.arange(5000) % 97 == 50, 600, TOKENS))
    options = [*SMALL, "--data", path, "--out", str(tmp_path / "run"), "--train.steps", "50", "--data.heldout", "0.005"]
    assert command(options) != 0
    assert "the text has the token 600" in capfd.readouterr().err
