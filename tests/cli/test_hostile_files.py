"""Hostile files of each kind that a command reads: one line, in bounded time and memory; nothing runs or is written."""

import json
import os
import random
import shutil
import struct

import numpy as np
import pytest
from forked import Commands, listing

from jaxshard.apps.config import seal
from jaxshard.cli import main

SECONDS, BYTES = 30, 2 * 2**30
SMALL = ["--model.layers", "1", "--model.width", "16", "--model.heads", "2", "--model.hidden", "32"]
SHORT = ["--train.steps", "2", "--optimizer.warmup-steps", "1", "--data.heldout-bytes", "300", "--train.log-to"]
SMALL += ["--train.rows", "8", "--model.sequence-length", "16", *SHORT]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run on tokens, a Hugging Face folder made of it, tokens, and a text: what files are put into."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "tokens").mkdir()
    np.random.default_rng(0).integers(0, 256, 4000).astype("<u2").tofile(folder / "tokens" / "train.bin")
    words = {chr(i) if chr(i).isprintable() else f"<{i}>": i for i in range(256)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "a"}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": model, "truncation": None, "padding": None}
    tokenizer |= dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    (folder / "tokens" / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "text").write_text("Some text. " * 500)
    assert main(["train", *SMALL, "--data", str(folder / "tokens"), "--out", str(folder / "run")]) == 0
    assert main(["ckpt", "export", str(folder / "run"), "--huggingface", str(folder / "hf")]) == 0
    return folder


# Kinds of files: what stands in the place of a good one. Each gets the path, the good bytes, and random numbers.


def pipe(path, good, chosen):
    os.mkfifo(path)


def socket(path, good, chosen):
    os.mknod(path, 0o140600)


def endless(path, good, chosen):
    names = ["/dev/zero", "/dev/random", "/dev/full", "/dev/tty", "/proc/kmsg", "/proc/self/mem"]
    path.symlink_to(chosen.choice(names))


def folder(path, good, chosen):
    path.mkdir()
    (path / "inside").write_bytes(good)


def link_to_itself(path, good, chosen):
    path.symlink_to(path.name)


def sparse(path, good, chosen):
    path.write_bytes(good[: chosen.choice([0, 8, 200, 1024])])
    os.truncate(path, chosen.choice([2**28 + 1, 10 * 2**30, 2**40]))


def of_zeros(path, good, chosen):
    path.write_bytes(good[: chosen.choice([0, 8, 200, 1024])])
    os.truncate(path, 2**28 + 1)


def empty(path, good, chosen):
    path.write_bytes(b"")


def cut(path, good, chosen):
    path.write_bytes(good[: chosen.randrange(max(1, len(good)))])


def changed(path, good, chosen):
    found = bytearray(good)
    for _ in range(chosen.choice([1, 3, 30])):
        found[chosen.randrange(len(found))] = chosen.randrange(256)
    path.write_bytes(found)


def noise(path, good, chosen):
    path.write_bytes(chosen.randbytes(chosen.choice([1, 100, 5000])))


def deep(path, good, chosen):
    before, after = chosen.choice([(b"[", b"]"), (b'{"a":', b"}"), (b"x = [", b"]"), (b"a = {a = ", b"}")])
    count = chosen.choice([1000, 100_000, 190_000])
    path.write_bytes(before * count + b"1" + after * count)


def many_digits(path, good, chosen):
    number = b"9" * chosen.choice([5000, 10**6 - 100])
    path.write_bytes(chosen.choice([b'{"step": %b}\n', b"[train]\nsteps = %b\n", b'{"n_layer": %b}', b"%b"]) % number)


def one_line(path, good, chosen):
    path.write_bytes(b'{"step": 1, "loss": [' + b"[]," * chosen.choice([10**4, 3 * 10**5, 10**7]) + b"1]}")


def many_lines(path, good, chosen):
    path.write_bytes(chosen.choice([b'{"step":1}\n', b"\n", b"x\n", b'{"step":1,"a":[{},{},{}]}\n']) * 10**6)


def odd_json(path, good, chosen):
    texts = ["null", "3", "[]", '"x"', "{}", "NaN", "1e999", '{"model": 3}', "\ufeff{}"]
    texts += [
        '{"weight_map": {"a": "../b"}}',
        '{"model": {"vocab": {"a": -1}}, "added_tokens": []}',
        '{"a": "\\ud800"}',
        '{"wandb": "../../x"}',
    ]
    path.write_bytes(chosen.choice(texts).encode())


def unreadable_text(path, good, chosen):
    path.write_bytes(chosen.choice([b"\xff\xfe\0x", b"\0" * 5000, b"\x1b[2J" * 50, "\u202e\u2066".encode() * 9]))


def lies(path, good, chosen):
    """Numbers that the format has, with others in their places."""
    number = chosen.choice([2**31 - 1, 2**31, 2**63 - 1, 2**64, -1, 0, 10**9, 10**30, 1e308])
    if path.suffix in (".safetensors", ".bin"):
        start = chosen.choice([b"", struct.pack("<i", 20240520), struct.pack("<i", 20240801)])
        path.write_bytes(start + struct.pack("<Q", int(abs(number)) % 2**64) + good[8 + len(start) :])
        return
    text = good.decode(errors="replace")
    places = [i for i in range(len(text)) if text[i].isdigit() and not text[i - 1].isalnum() and text[i - 1] != "."]
    place = chosen.choice(places or [0])
    end = place
    while end < len(text) and text[end].isdigit():
        end += 1
    text = text[:place] + str(number) + text[end:]
    path.write_bytes(sealed(text).encode() if path.name == "config.toml" else text.encode())


def sealed(text):
    """A configuration as jaxshard seals it: an attacker can do that, too."""
    return seal.sealed("".join(line for line in text.splitlines(True) if not line.startswith("#")))


FORMS = [pipe, socket, endless, folder, link_to_itself, sparse, empty, cut, changed, noise, deep, many_digits, one_line]
FORMS += [many_lines, odd_json, unreadable_text, lies, lies, lies, lies]

READ = {  # each file, and the commands that read it
    "run/config.toml": [
        ["eval", "run"],
        ["generate", "run", "--prompt", "1 2", "--tokens", "2"],
        ["train", "--resume", "--out", "run", "--train.steps", "3"],
        ["train", "--resume-if-saved", "--out", "run", "--train.steps", "3"],
        ["train", *SMALL, "--data", "tokens", "--train.start", "run", "--out", "new"],
        ["train", "run/config.toml", "--out", "new"],
        ["plan", "run/config.toml"],
        ["explain", "run/config.toml", "--no-compile"],
        ["ckpt", "export", "run", "--huggingface", "new"],
    ],
    "run/metrics.jsonl": [
        ["train", "--resume", "--out", "run", "--train.steps", "3"],
        ["train", "--resume-if-saved", "--out", "run", "--train.steps", "3"],
    ],
    "run/trackers.json": [["train", "--resume", "--out", "run", "--train.steps", "3"]],
    "run/tokenizer.json": [
        ["eval", "run", "--data", "tokens"],
        ["generate", "run", "--prompt", "ab", "--tokens", "2"],
        ["train", "--resume", "--out", "run", "--train.steps", "3"],
        ["ckpt", "export", "run", "--huggingface", "new"],
    ],
    "tokens/tokenizer.json": [
        ["train", *SMALL, "--data", "tokens", "--out", "new"],
        ["tokenize", "text", "--tokenizer", "tokens/tokenizer.json", "--out", "new"],
        ["tokenize", "text", "--tokenizer", "tokens", "--out", "new"],
        ["generate", "run", "--tokenizer", "tokens/tokenizer.json", "--prompt", "ab", "--tokens", "2"],
    ],
    "tokens/train.bin": [
        ["train", *SMALL, "--data", "tokens", "--out", "new"],
        ["eval", "run", "--data", "tokens/train.bin"],
    ],
    "text": [
        ["train", *SMALL, "--data", "text", "--out", "new"],
        ["tokenize", "text", "--vocabulary", "300", "--out", "new"],
    ],
    "hf/config.json": [
        ["eval", "hf", "--data", "tokens/train.bin"],
        ["generate", "hf", "--prompt", "ab", "--tokens", "2"],
        ["train", "--model.sequence-length", "16", "--train.start", "hf", *SHORT, "--data", "tokens", "--out", "new"],
        ["plan", "--train.start", "hf"],
    ],
    "hf/model.safetensors": [
        ["eval", "hf", "--data", "tokens/train.bin"],
        ["generate", "hf", "--prompt", "ab", "--tokens", "2"],
    ],
    "hf/model.safetensors.index.json": [
        ["generate", "hf/model.safetensors.index.json", "--prompt", "ab", "--tokens", "2"]
    ],
    "hf/tokenizer.json": [
        ["generate", "hf", "--prompt", "ab", "--tokens", "2"],
        ["train", "--model.sequence-length", "16", "--train.start", "hf", *SHORT, "--data", "tokens", "--out", "new"],
    ],
    "hf/tokenizer_config.json": [
        ["train", "--model.sequence-length", "16", "--train.start", "hf", *SHORT, "--data", "tokens", "--out", "new"]
    ],
}
WRITTEN = ("new", "run")


def wrong_with(commands, place, words, seconds):
    """What is not as it should be after a command; "" if all is."""
    before = listing(place)
    ended = commands.run(words, place / "here", seconds=seconds)
    outside = {name for name, _ in set(listing(place).items()) ^ set(before.items())}
    outside = {name for name in outside if name.split("/")[1:2] not in [[each] for each in WRITTEN]} - {"here"}
    if ended.status is None:
        return f"hangs: {ended.err[-300:]}"
    if ended.status not in (0, 1, 2) or "Traceback" in ended.err + ended.out:
        return f"status {ended.status}: {ended.err[-900:]}"
    if ended.status == 2 and ended.err.count("\n") != 1 and "config.toml: " not in ended.err:
        return f"{ended.err.count(chr(10))} lines: {ended.err[:500]}"
    if not ended.err.replace("\n", "").isprintable():
        return f"not printable: {ended.err[:300]!r}"
    if outside:
        return f"changed {sorted(outside)[:3]}"
    return f"{ended.peak / 1e9:.1f} GB" if ended.peak > BYTES else ""


def put(whole, place, name, form, chosen):
    """A copy of all, with a hostile file in the place of one."""
    shutil.rmtree(place / "here", ignore_errors=True)
    shutil.copytree(whole, place / "here")
    path = place / "here" / name
    good = path.read_bytes() if path.exists() else b'{"weight_map": {"a": "model.safetensors"}, "wandb": "0123abcd"}'
    path.unlink(missing_ok=True)
    form(path, good, chosen)


def tried(whole, place, cases):
    """Runs cases of (file, form, seed), each with one of the commands that read the file."""
    wrong = []
    kept = {"JAX_COMPILATION_CACHE_DIR": str(whole.with_name("compiled"))}
    with Commands(JAX_NUM_CPU_DEVICES="2", JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0", **kept) as commands:
        seconds = SECONDS * max(1, os.getloadavg()[0] / (os.cpu_count() or 1))  # where other programs take the cores
        for name, form, seed in cases:
            chosen = random.Random(seed)
            put(whole, place, name, form, chosen)
            words = chosen.choice(READ[name])
            found = wrong_with(commands, place, words, seconds)
            wrong += [(name, form.__name__, seed, words, found)] if found else []
    print(f"{len(cases)} hostile files, {len(wrong)} wrong")
    return wrong


def cases(count, seed, names=tuple(READ)):
    chosen = random.Random(seed)
    found = [(name, chosen.choice(FORMS), chosen.randrange(2**32)) for name in names for _ in range(count)]
    of_a_size = {("tokens/train.bin", sparse): of_zeros}  # all its bytes are read: 1 TB for as long as that takes
    found = [(name, of_a_size.get((name, form), form), seed) for name, form, seed in found]
    return [each for each in found if each[:2] != ("text", sparse)]  # so is a text


def test_a_hostile_file_of_each_kind(whole, tmp_path):
    assert not tried(whole, tmp_path, cases(1, seed=0))


@pytest.mark.nightly
@pytest.mark.parametrize("name", READ)
def test_60_hostile_files_of_each_kind(whole, tmp_path, name):
    assert not tried(whole, tmp_path, cases(60, seed=1, names=[name]))


def test_two_billion_layers_are_refused_at_once(whole, tmp_path):
    """Sizes that a small file says are compared with the arrays that are there."""
    with Commands(JAX_NUM_CPU_DEVICES="2") as commands:
        for name, before, after in (
            ("run/config.toml", "layers = 1\n", "layers = 2147483647\n"),
            ("run/config.toml", "width = 16\n", "width = 1000000000\n"),
            ("hf/config.json", '"num_hidden_layers": 1,', '"num_hidden_layers": 2147483647,'),
        ):
            put(whole, tmp_path, name, lambda path, good, _: path.write_bytes(good), None)
            path = tmp_path / "here" / name
            text = path.read_text().replace(before, after)
            assert text != path.read_text()
            path.write_text(sealed(text) if name == "run/config.toml" else text)
            for words in READ[name][:3]:
                ended = commands.run(words, tmp_path / "here", seconds=SECONDS)
                assert (ended.status, ended.err.count("\n")) == (2, 1), (words, ended)


def test_a_configuration_that_no_run_can_have_is_one_line(whole, tmp_path, capsys):
    """Also where its seal is right."""
    shutil.copytree(whole / "run", tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    lines = config.read_text().replace("heads = 2", "heads = 0").splitlines(keepends=True)
    config.write_text(seal.sealed("".join(lines[1:])))
    capsys.readouterr()
    for command in ("eval", "generate"):
        assert main([command, str(tmp_path / "run")]) == 2
        assert capsys.readouterr().err.endswith("config.toml: model.heads = 0: it must be above 0\n")


def test_what_an_export_copies_is_the_runs_own(whole, tmp_path, capsys):
    run, (linked, made) = tmp_path / "run", (tmp_path / "elsewhere", tmp_path / "hf")
    shutil.copytree(whole / "run", run)
    for name in ("tokenizer.json", "huggingface"):
        linked.mkdir(exist_ok=True)
        (linked / "merges.txt").write_text("a b\n")
        if (run / name).exists():
            (run / name).rename(linked / name)
        (run / name).symlink_to(linked / name if (linked / name).exists() else linked)
        assert main(["ckpt", "export", str(run), "--huggingface", str(made)]) == 2
        assert "it is a link to " in capsys.readouterr().err
        assert not made.exists()
        (run / name).unlink()
