"""`jaxshard eval`: the loss that training found, on whatever devices, and that of other texts."""

import json
import math
import re

import numpy as np
import pytest

from jaxshard.cli import main

OPTIONS = ["--model.layers", "2", "--model.width", "16", "--model.heads", "2", "--model.hidden", "32"]
OPTIONS += ["--train.rows", "8", "--model.sequence-length", "16", "--train.steps", "2", "--data.heldout-bytes", "1000"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    np.random.default_rng(0).integers(0, 300, 4000).astype("<u2").tofile(folder / "train.bin")
    (folder / "text.txt").write_text("Some other text. " * 40)
    lora = ["--train.start", str(folder / "bytes"), "--lora.rank", "2", "--lora.base", "int8"]
    extra = {
        "bytes": ["--sharding.strategy", "hybrid", "--sharding.tensor", "2"],
        "lora": lora,
        "tokens": ["--data", str(folder / "train.bin"), "--model.vocabulary", "512"],
    }
    for name, options in extra.items():
        assert main(["train", *OPTIONS, *options, "--out", str(folder / name)]) == 0
    return folder


def nats(capfd, *arguments):
    capfd.readouterr()
    assert main(["eval", *map(str, arguments)]) == 0
    out = capfd.readouterr().out
    return float(re.search(r"([\d.]+) nats, on", out)[1]), out


@pytest.mark.parametrize("name", ["bytes", "lora", "tokens"])
def test_it_is_the_loss_that_training_found(name, runs, capfd):
    records = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
    want = [record["heldout_loss"] for record in records if "heldout_loss" in record][-1]
    found, out = nats(capfd, runs / name, "--rows", 3)
    assert found == pytest.approx(want, rel=2e-5)
    if name != "tokens":
        assert f"held out: {found / math.log(2):.3f} bits/byte" in out


def test_another_text_is_measured_whole(runs, capfd):
    found, out = nats(capfd, runs / "bytes", "--data", runs / "text.txt")
    assert f"on {17 * 40} bytes" in out
    assert found != nats(capfd, runs / "bytes")[0]


WRONG = {
    "no run": (["nowhere"], "RUN nowhere: no saved run"),
    "no text": (["bytes", "--data", "nowhere.txt"], "'nowhere.txt' does not exist"),
    "another kind": (["bytes", "--data", "train.bin"], "has tokens, and the run's model does not"),
    "text for tokens": (["tokens", "--data", "text.txt"], "has bytes, and the run's model does not"),
    "no rows": (["bytes", "--rows", "0"], "--rows 0 must be at least 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_told(name, runs, capfd):
    (run, *options), words = WRONG[name]
    options = [str(runs / option) if (runs / option).exists() else option for option in options]
    assert main(["eval", str(runs / run) if run != "nowhere" else run, *options]) == 2
    assert words in capfd.readouterr().err
