"""What leaves here is read by `transformers` itself, and computes the same there.

By the Python that JAXSHARD_TRANSFORMERS names, or this one, where torch and transformers are:
`JAXSHARD_TRANSFORMERS=/path/to/python pytest -m nightly tests/apps/test_hf_live.py`.
"""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from hf_models import fresh, greedy_of, logits_of, saved_run
from test_hf import FAMILIES, export

from jaxshard.apps.config.config import Config, LoraConfig

PYTHON = os.environ.get("JAXSHARD_TRANSFORMERS", sys.executable)
WORKER = pathlib.Path(__file__).with_name("hf_logits.py")
PROMPT = np.asarray([5, 9, 250])

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module", autouse=True)
def transformers_are_there():
    if subprocess.run([PYTHON, "-c", "import torch, transformers"], capture_output=True).returncode:
        pytest.skip(f"{PYTHON} has no torch and transformers")


def theirs(folder, tokens, place):
    np.savez(place / "in.npz", tokens=tokens, prompt=PROMPT)
    arguments = [PYTHON, str(WORKER), str(folder), str(place / "in.npz"), str(place / "out.npz")]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return np.load(place / "out.npz")


BIG = dataclasses.replace(FAMILIES["llama"], width=96, sequence_length=64, rotary_length=16, rotary_base=100.0)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("name", [*FAMILIES, "llama, long"])
def test_transformers_computes_the_same_of_what_was_exported(name, rank, tmp_path):
    config = Config(model={**FAMILIES, "llama, long": BIG}[name], lora=LoraConfig(rank=rank))
    model, params = fresh(config)
    folder = export(saved_run(tmp_path / "run", config, params), tmp_path / "out", "--shard-size", "20kB")
    tokens = np.random.default_rng(0).integers(0, config.model.vocabulary, (2, config.model.sequence_length))
    want = theirs(folder, tokens, tmp_path)
    with jax.default_matmul_precision("highest"):
        logits = logits_of(model, params, tokens)
        count = min(5, config.model.sequence_length - len(PROMPT))
        assert greedy_of(model, params, list(PROMPT), count) == want["greedy"].tolist()[:count]
    far = np.abs(logits - want["logits"]).max() / np.abs(want["logits"]).max()
    print(f"{name}, rank {rank}: {far:.1e}")
    assert far < (1e-4 if rank else 1e-5)  # adapters beside a matrix round otherwise than one merged matrix
