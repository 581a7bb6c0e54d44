"""A small file takes little memory: what is stored must be as large as it says, before anything is allocated for it."""

import os
import resource
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from clock import at_most
from test_damage import edited

import jaxshard.checkpoint
from jaxshard.checkpoint import Checkpointer, CorruptCheckpointError
from jaxshard.checkpoint.storage import sizes

SAVED = {"w": jnp.zeros((64, 128)), "n": 3}
HUGE = 2**40


@pytest.fixture
def step(tmp_path):
    with Checkpointer(tmp_path / "saves") as checkpoints:
        checkpoints.save(1, SAVED)
    return tmp_path / "saves" / "1"


def calls(folder):
    """Each way to read arrays."""
    checkpoints = Checkpointer(folder)
    yield lambda: checkpoints.verify(1)
    yield lambda: list(checkpoints.read(1))
    yield lambda: jaxshard.checkpoint.read(folder, 1)
    yield lambda: checkpoints.restore(template_of(checkpoints), 1)


def template_of(checkpoints):

    index = checkpoints.info(1)["leaves"]
    return {"w": jax.ShapeDtypeStruct(tuple(index["w"]["shape"]), index["w"]["dtype"]), "n": 0}


def refused(folder, reason):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for call in calls(folder):
        with pytest.raises(CorruptCheckpointError, match=reason):
            call()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 2**17  # KiB, of which the checkpoint has 32


def rewritten(step, shape, codecs, chunk=None):
    """The array anew, under other codecs or in other pieces, and the index sealed for it."""
    base = {"driver": "file", "path": f"{step}/state/"}
    spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": "w/"}}
    grid = {"name": "regular", "configuration": {"chunk_shape": chunk or shape}}
    metadata = {"shape": shape, "data_type": "float32", "codecs": codecs, "chunk_grid": grid}
    made = tensorstore.open(spec | {"metadata": metadata}, create=True, delete_existing=True).result()
    if chunk is None:
        made.write(np.zeros(shape, np.float32)).result()
    edited(step, lambda index: index["leaves"]["w"].update(shape=shape), seal=True)


def test_an_index_that_lists_more_bytes_than_there_are(step):
    edited(step, lambda index: index["leaves"]["w"].update(shape=[HUGE]), seal=True)
    refused(step.parent, "its index lists arrays of 4,398,046,511,104 bytes, but all files of .* have")


def test_a_chunk_that_was_compressed_a_thousand_times(step):
    """As large as others in the folder say: 64 MB are there, of which 4 kB are the array."""
    zstd = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "zstd"}]
    rewritten(step, [2**24], zstd)
    refused(step.parent, "its index lists arrays of 67,108,864 bytes")
    with (step / "state" / "padding").open("wb") as file:
        file.truncate(2**30)
    refused(step.parent, "w is stored with the codecs .*zstd.*; jaxshard stores plain bytes")


def test_pieces_that_are_larger_than_their_array(step):
    plain = [{"name": "bytes", "configuration": {"endian": "little"}}]
    rewritten(step, [64, 128], plain, chunk=[2**20, 2**20])
    refused(step.parent, r"w of shape \(64, 128\) is stored in pieces of \[1048576, 1048576\]")


def test_an_array_that_is_described_otherwise_than_in_the_index(step):
    edited(step, lambda index: index["leaves"]["w"].update(shape=[8192]), seal=True)
    refused(step.parent, r"w is stored as float32\[64, 128\], and listed as float32\(8192,\)")


def frame(blocks):
    """A frame of zstd of so many blocks, each of which is one byte, 128 KiB times."""
    every = (2**17 << 3 | 1 << 1).to_bytes(3, "little") + b"a"
    return bytes.fromhex("28b52ffd00") + b"\x58" + every * (blocks - 1) + bytes([every[0] | 1]) + every[1:]


@pytest.mark.parametrize("blocks", [2049, 10**5])
def test_a_tree_that_is_a_bomb(step, blocks):
    """400 kB that become 13 GB."""
    path = step / "state" / "manifest.ocdbt"
    content = frame(blocks)
    path.write_bytes(path.read_bytes()[:4] + (len(content) + 18).to_bytes(8, "little") + b"\0\1" + content + b"crcs")
    refused(step.parent, "a node of its tree has .* bytes, and more than 268,435,456 once it is decoded")


def test_the_most_that_a_frame_becomes_is_what_zstd_makes_of_it():
    """Of frames that tensorstore made, the bound holds and is near."""
    for data in (b"abc" * 100, b"a" * 10**6, np.random.default_rng(0).bytes(300_000)):
        path = {"driver": "memory", "path": "a/"}
        metadata = {"shape": [len(data)], "data_type": "uint8", "codecs": [{"name": "zstd"}]}
        made = tensorstore.open({"driver": "zarr3", "kvstore": path, "metadata": metadata}, create=True).result()
        made.write(np.frombuffer(data, np.uint8)).result()
        assert len(data) <= sizes._most_bytes(made.kvstore.read("c/0").result().value) <= len(data) + 2**17


@pytest.mark.parametrize("cut", range(0, 40, 3))
def test_a_frame_that_is_cut_short(cut):
    whole = frame(3)
    with pytest.raises(ValueError, match="a node of its tree"):
        sizes._most_bytes(whole[: min(cut, len(whole) - 1)])


def test_a_tree_that_lies_elsewhere(step):
    for location in ("btreenode:../:d/x:0:9", "btreenode:/etc/:passwd:0:9", "btreenode::../../x:0:9"):
        with pytest.raises(ValueError, match="is outside the checkpoint"):
            sizes._read_node(step / "state", location)


def test_what_is_no_file_is_not_opened(step):
    """A pipe would not end."""
    for name in ("manifest.ocdbt", "d/pipe"):
        path = step / "state" / name
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        refused(step.parent, f"{name} is not a file")
        path.unlink()


@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "state/_METADATA", "state/manifest.ocdbt"])
def test_a_description_of_a_terabyte_is_not_read(step, name):
    """Nor is the hole in it, to see whether the disk can be read."""
    os.truncate(step / name, HUGE)
    checkpoints = Checkpointer(step.parent)
    with at_most(20), pytest.raises(CorruptCheckpointError, match=r"has more than 268,435,456 bytes"):
        checkpoints.verify(1)


@pytest.mark.parametrize("shape", [[0], [64, 0, 128], [1] * 65])
def test_a_leaf_that_is_none_is_corrupt(step, shape):
    """An array without elements is not stored, so that its digest is all that tells it from one that has some."""
    edited(step, lambda index: index["leaves"]["w"].update(shape=shape, digest=7), seal=True)
    for call in (Checkpointer(step.parent).verify, Checkpointer(step.parent).info):
        with pytest.raises(CorruptCheckpointError, match="'w' is described by"):
            call(1)


def test_the_command_takes_little_memory(step):
    edited(step, lambda index: index["leaves"]["w"].update(shape=[HUGE]), seal=True)
    run = subprocess.run(
        [sys.executable, "-m", "jaxshard", "ckpt", "verify", str(step.parent)],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert (run.returncode, run.stderr) == (1, "")
    assert run.stdout.startswith("step 1: corrupt: its index lists arrays of")
