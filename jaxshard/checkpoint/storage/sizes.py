"""Checks stored sizes before allocating memory, so that a small hostile file cannot claim much.

jaxshard stores arrays uncompressed: an index that lists more bytes than its folder holds is wrong, and so is an array
with another codec. Tensorstore's index of array chunks (OCDBT) is a tree compressed by zstd; the blocks' headers bound
its decoded size.
"""

import contextlib
import json
import math
import stat
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorstore

from jaxshard.checkpoint.storage.errors import files_in, patiently, read_description
from jaxshard.checkpoint.storage.leaves import Index, Shaped, is_stored, num_bytes
from jaxshard.checkpoint.storage.paths import PlainPath
from jaxshard.system import small_files

ARRAYS, ARRAY_NAMES = "state", "_METADATA"  # the folder of the arrays, and orbax's list of them in it
_ZARR = "/zarr.json"  # ends the name of an array's metadata
_NODE_BYTES = 2**28  # the most of a decoded node; orbax makes nodes of at most 10**8 bytes
_ZSTD, _BLOCK_BYTES = 0xFD2FB528, 2**17
_PLAIN = ([{"name": "bytes"}], [{"configuration": {"endian": "little"}, "name": "bytes"}])


def check_index(folder: Path, index: Index) -> None:
    """Raises ValueError unless a step's folder is large enough for the arrays of an index, and has only files and
    folders."""
    listed = sum(num_bytes(entry) for entry in index.values() if is_stored(entry))
    stored = sum(_size(path) for path in files_in(folder))
    if listed > stored:
        raise ValueError(f"its index lists arrays of {listed:,} bytes, but all files of {folder} have {stored:,}")


def _size(path: Path) -> int:
    found = patiently(path.stat)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is not a file")
    return found.st_size


def check_arrays(arrays: Path, wanted: Mapping[str, Shaped]) -> None:
    """Checks the metadata of stored arrays before they are read.

    Args:
      arrays: the folder of a step's arrays.
      wanted: by stored name, with the shapes and dtypes of the index; arrays that are not stored are skipped.

    Raises:
      ValueError: an array's metadata differ from the index, or jaxshard never writes such.
    """
    check_tree(arrays)
    store = open_store(arrays)
    asked = {name: store.read(f"{name}{_ZARR}") for name in wanted}
    for name, answer in asked.items():
        if text := answer.result().value:
            _check_described(name, wanted[name], json.loads(text))


def open_store(arrays: Path) -> tensorstore.KvStore:
    """The store of the arrays' chunks, by name."""
    base = {"driver": "file", "path": f"{arrays}/"}
    return tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()


def listed(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """(shape, dtype) of each array of a step whose chunks are all listed, by stored name; reads no chunk.

    Raises:
      Exception: as `read`, if a list cannot be read.
    """
    with contextlib.closing(PlainPath.of(folder.parent)) as plain:
        arrays = plain.path / folder.name / ARRAYS
        json.loads(read_description(arrays / ARRAY_NAMES))
        store = open_store(arrays)
        keys = [key.decode() for key in store.list().result()]
        asked = {key.removesuffix(_ZARR): store.read(key) for key in keys if key.endswith(_ZARR)}
        described = {name: json.loads(answer.result().value) for name, answer in asked.items()}
    num_pieces = Counter(key.partition("/c")[0] for key in keys)
    return {
        name: (tuple(said["shape"]), said["data_type"])
        for name, said in described.items()
        if num_pieces[name] == _num_pieces(said)
    }


def _num_pieces(said: Mapping[str, Any]) -> int:
    """The number of chunks in an array's zarr metadata."""
    piece = said["chunk_grid"]["configuration"]["chunk_shape"]
    return math.prod(-(-size // part) for size, part in zip(said["shape"], piece, strict=True))


def _check_described(name: str, x: Shaped, said: Mapping[str, Any]) -> None:
    codecs, chunk = said["codecs"], said["chunk_grid"]["configuration"]["chunk_shape"]
    inner = chunk
    if [codec["name"] for codec in codecs] == ["sharding_indexed"]:
        inner, codecs = (codecs[0]["configuration"][key] for key in ("chunk_shape", "codecs"))
    if tuple(said["shape"]) != tuple(x.shape) or said["data_type"] != str(x.dtype):
        raise ValueError(f"{name} is stored as {said['data_type']}{said['shape']}, and listed as {x.dtype}{x.shape}")
    if codecs not in _PLAIN:
        raise ValueError(f"{name} is stored with the codecs {codecs!r:.200}; jaxshard stores plain bytes")
    sizes = zip(inner, chunk, x.shape, strict=True)
    if any(not 0 < part <= whole <= size for part, whole, size in sizes):
        raise ValueError(f"{name} of shape {x.shape} is stored in pieces of {chunk}")


# The tree of chunks.


def check_tree(arrays: Path) -> None:
    """Raises ValueError for a node of the tree that is damaged, or larger than 256 MiB once decoded."""
    _check_node(read_description(arrays / "manifest.ocdbt"))
    base = tensorstore.KvStore.open({"driver": "file", "path": f"{arrays}/"}).result()
    root = tensorstore.ocdbt.dump(base).result()["versions"][-1]
    seen = set[tuple[str, int]]()
    left: list[tuple[str, int]] = [(root["root"]["location"], root["root_height"])] if "root" in root else []
    while left:
        location, height = node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        _check_node(_read_node(arrays, location))
        if height:
            inner = tensorstore.ocdbt.dump(base, node=location).result()
            left += [(each["location"], height - 1) for each in inner["entries"]]


def _read_node(arrays: Path, location: str) -> bytes:
    """The bytes of the node at "btreenode:<folder>:<file>:<offset>:<length>"."""
    _, folder, name, offset, length = location.split(":")
    path = Path(folder) / name
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{location} is outside the checkpoint")
    most = min(int(length), _NODE_BYTES)
    return patiently(lambda: small_files.read_part(arrays / path, int(offset), most))


def _check_node(data: bytes) -> None:
    """Checks a node: magic number, length, version, compression flag, content, CRC-32C."""
    version, compressed, content = data[12:13], data[13:14], data[14:-4]
    if version != b"\0" or compressed not in (b"\0", b"\1"):
        raise ValueError("a node of its tree has an invalid header")
    if compressed == b"\1" and _most_bytes(content) > _NODE_BYTES:
        raise ValueError(
            f"a node of its tree has {len(data):,} bytes, and more than {_NODE_BYTES:,} once it is decoded"
        )


def _most_bytes(frame: bytes) -> int:
    """The largest decoded size of a zstd frame, by its blocks (RFC 8878, section 3.1.1).

    >>> _most_bytes(bytes.fromhex("28b52ffd2003190000616263"))  # "abc", as it is
    3
    """
    found = frame[4:5]
    if int.from_bytes(frame[:4], "little") != _ZSTD or not found:
        raise ValueError("a node of its tree is not a zstd frame")
    flags = found[0]
    alone, has_checksum = flags >> 5 & 1, flags >> 2 & 1
    at = 5 + (not alone) + (0, 1, 2, 4)[flags & 3] + (alone, 2, 4, 8)[flags >> 6]
    total, is_last = 0, False
    while not is_last and total <= _NODE_BYTES:
        header = int.from_bytes(frame[at : at + 3], "little")
        is_last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        if at + 3 > len(frame) or kind == 3:
            raise ValueError("a node of its tree is truncated")
        at += 3 + (1 if kind == 1 else size)
        total += _BLOCK_BYTES if kind == 2 else size
    if is_last and at + 4 * has_checksum != len(frame):
        raise ValueError("a node of its tree has a wrong length")
    return total
