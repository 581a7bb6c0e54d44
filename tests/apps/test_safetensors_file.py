"""Tensors of .safetensors files: as the library has them, and an error where a file is not whole."""

import json
import os
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxshard.apps.huggingface import safetensors_file

JAXSHARD = Path(safetensors_file.__file__).parents[2]
TENSORS = {
    "half": np.arange(6, dtype=np.float16).reshape(2, 3),
    "brain": np.asarray(jnp.arange(5, dtype=jnp.bfloat16)),
    "single": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "double": np.asarray(3.5),
    "empty": np.zeros((0, 4), np.float32),
    "mask": np.ones(3, np.bool_),
}


@pytest.fixture
def file(tmp_path):
    save_file(TENSORS, tmp_path / "x.safetensors", {"format": "np"})
    return tmp_path / "x.safetensors"


def test_tensors_come_as_the_library_wrote_them(file):
    found = safetensors_file.entries(file)
    assert {name: entry.shape for name, entry in found.items()} == {name: x.shape for name, x in TENSORS.items()}
    assert found["mask"].dtype == "BOOL"
    for name in set(TENSORS) - {"mask"}:
        x = safetensors_file.tensor(file, name)
        assert x.dtype == TENSORS[name].dtype
        np.testing.assert_array_equal(x, TENSORS[name])


def header(file, change):
    """Changes the header of a file; `change` gets it as a dict."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    found = json.loads(content[8 : 8 + length])
    new = json.dumps(change(found) or found).encode()
    file.write_bytes(len(new).to_bytes(8, "little") + new + content[8 + length :])


HARMS = {
    "empty": (lambda f: f.write_bytes(b""), "its header does not fit"),
    "seven bytes": (lambda f: f.write_bytes(b"\x01" * 7), "its header does not fit"),
    "a huge header": (lambda f: f.write_bytes(b"\xff" * 7 + b"\0" + bytes(99)), "its header does not fit"),
    "no json": (lambda f: f.write_bytes((4).to_bytes(8, "little") + b"{{{{"), "its header is not a .safetensors"),
    "a list": (lambda f: header(f, lambda h: [1]), "its header is not a .safetensors"),
    "deep": (
        lambda f: f.write_bytes((200_000).to_bytes(8, "little") + b"[" * 200_000),
        "its header is not a .safetensors",
    ),
    "cut short": (lambda f: os.truncate(f, f.stat().st_size - 1), "without gaps"),
    "longer": (lambda f: f.write_bytes(f.read_bytes() + b"\0"), "without gaps"),
    "negative": (lambda f: header(f, lambda h: h["half"].update(data_offsets=[-4, 8])), "does not describe a tensor"),
    "a huge shape": (
        lambda f: header(f, lambda h: h["half"].update(shape=[2**62, 2**62])),
        "a different number of bytes than its shape",
    ),
    "overlapping": (
        lambda f: header(f, lambda h: h["half"].update(data_offsets=h["brain"]["data_offsets"], shape=[5])),
        "without gaps",
    ),
    "no type": (lambda f: header(f, lambda h: h["half"].pop("dtype") and None), "KeyError: 'dtype'"),
}


@pytest.mark.parametrize("name", HARMS)
def test_a_file_that_is_not_whole_is_an_error(name, file):
    harm, words = HARMS[name]
    harm(file)
    with pytest.raises(ValueError, match=re.escape(words)):
        safetensors_file.entries(file)
    with pytest.raises(OSError, match="cannot be read"):
        safetensors_file.tensor(file, "single")


def test_a_file_that_is_cut_short_while_it_is_read_is_an_error(file, monkeypatch):
    """Mapped, it ended the program by SIGBUS."""
    entries = safetensors_file.entries

    def then_cut(path):
        found = entries(path)
        os.truncate(path, found["single"].last - 4)
        return found

    monkeypatch.setattr(safetensors_file, "entries", then_cut)
    with pytest.raises(OSError, match="was truncated while jaxshard read it: single is incomplete"):
        safetensors_file.tensor(file, "single")


def test_no_file_is_mapped_into_memory():
    """A mapped file that is cut short, or whose disk fails, ends a program by SIGBUS, without a word."""
    mapping = re.compile(r"\bmemmap\(|\bmmap\b|\bsafe_open\(|mmap_mode|safetensors\.\w+ import .*load_file")
    found = {
        f"{path.relative_to(JAXSHARD)}: {line.strip()}"
        for path in JAXSHARD.rglob("*.py")
        for line in path.read_text().splitlines()
        if mapping.search(line)
    }
    assert found == set()
