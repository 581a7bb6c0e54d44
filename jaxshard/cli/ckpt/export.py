"""Writes a checkpoint's arrays by the safetensors library, to one file or to shards with an index.

Arrays are distributed to shards, shards named and the index written as by Hugging Face's `save_pretrained`, so that its
loaders find every array. All files are written to a hidden folder beside their destination and moved when complete, the
index last. At most one shard is in memory.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save, save_file

from jaxshard.checkpoint.storage.leaves import Entry, Index
from jaxshard.system.files import publish, replace, sync_folder, sync_tree, workplace
from jaxshard.system.text import size_in_words

Read = Callable[[Sequence[str]], Iterable[tuple[str, np.ndarray]]]

_SUFFIX = ".safetensors"
_NOTES = "__metadata__"  # the format's own entry
_HEADER_BYTES = 200  # of one array, at most, besides its name


def check_free(file: Path, *others: Path) -> None:
    """Raises ValueError if `file` or one of `others` exists, or its folder does not."""
    for taken in filter(os.path.lexists, (file, *others)):
        which = "" if taken == file else f": {taken}"
        raise ValueError(f"--safetensors {file}{which} already exists: give a new file")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"--safetensors {file}: the folder {file.parent} does not exist: create it first")


def num_bytes(leaf: Entry) -> int:
    """The size of one array in bytes, from its entry in a checkpoint's index.

    >>> num_bytes({"shape": [3, 4], "dtype": "bfloat16", "digest": 0})
    24
    """
    return int(np.prod(leaf["shape"])) * jnp.dtype(leaf["dtype"]).itemsize


def index_of(file: Path) -> Path:
    """The path of the index of the shards of `file`.

    >>> index_of(Path("model.safetensors")).name
    'model.safetensors.index.json'
    """
    return file.with_name(f"{_stem(file)}{_SUFFIX}.index.json")


def shards_of(file: Path, leaves: Index, most_bytes: float) -> dict[Path, list[str]]:
    """Distributes the arrays, in order, to files of at most `most_bytes`; a larger array gets a file of its own.

    Args:
      file: the file, if one is enough; else the shards are named after it.
      leaves: path -> shape and dtype.
      most_bytes: the most bytes of arrays in one shard.

    Returns:
      file -> the paths of its arrays.

    >>> leaves: Index = {path: {"shape": [3], "dtype": "float32", "digest": 0} for path in "abc"}
    >>> {shard.name: paths for shard, paths in shards_of(Path("m.safetensors"), leaves, 24).items()}
    {'m-00001-of-00002.safetensors': ['a', 'b'], 'm-00002-of-00002.safetensors': ['c']}
    """
    groups: list[list[str]] = []
    current, held = [], 0
    for path, size in ((path, num_bytes(leaf)) for path, leaf in leaves.items()):
        if size > most_bytes:
            groups.append([path])
            continue
        if held + size > most_bytes:
            groups.append(current)
            current, held = [], 0
        current, held = [*current, path], held + size
    groups += [current] if current else []
    if len(groups) == 1:
        return {file: groups[0]}
    names = (f"{_stem(file)}-{number + 1:05d}-of-{len(groups):05d}{_SUFFIX}" for number in range(len(groups)))
    return {file.with_name(name): paths for name, paths in zip(names, groups, strict=True)}


def write(file: Path, leaves: Index, read: Read, notes: Mapping[str, str], most_bytes: float) -> int:
    """Writes the arrays; all files appear, or none.

    Args:
      file: must not exist; shards are named after it.
      leaves: path -> shape and dtype.
      read: paths -> (path, array) for each.
      notes: for the header of each file.
      most_bytes: the most bytes of arrays in one shard.

    Returns:
      The number of shards; 1: `file` holds all arrays, and there is no index.

    Raises:
      ValueError: the format does not support a dtype or a name; or one of the files exists.
      OSError: a file cannot be written, or another export has just written it.
    """
    _check_dtypes(leaves)
    shards = shards_of(file, leaves, most_bytes)
    check_free(file, index_of(file), *shards)
    _check_space(file, leaves)
    with workplace(file.absolute().parent) as folder:
        for shard, paths in shards.items():
            _write_shard(folder / shard.name, read(paths), notes)
        if len(shards) > 1:
            _write_index(folder / index_of(file).name, shards, sum(map(num_bytes, leaves.values())))
        _publish(folder, file, [*shards, *([index_of(file)] if len(shards) > 1 else [])])
    return len(shards)


def _stem(file: Path) -> str:
    return file.name.removesuffix(_SUFFIX)


def _check_dtypes(leaves: Index) -> None:
    wrong = [f"{path} ({leaf['dtype']})" for path, leaf in leaves.items() if not _has_dtype(leaf["dtype"])]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(
            f"a .safetensors file cannot hold {', '.join(wrong[:5])}{more}: choose different leaves with --only REGEX"
        )
    if _NOTES in leaves:
        raise ValueError(
            f"a .safetensors file cannot hold a leaf called {_NOTES}: choose different leaves with --only REGEX"
        )


def _has_dtype(dtype: str) -> bool:
    """Whether the library writes an array of this dtype."""
    try:
        return bool(save({"nothing": np.zeros(0, jnp.dtype(dtype))}))
    except SafetensorError:
        return False


def _check_space(file: Path, leaves: Index) -> None:
    headers = sum(len(json.dumps(path)) + _HEADER_BYTES for path in leaves)
    needed, free = sum(map(num_bytes, leaves.values())), shutil.disk_usage(file.absolute().parent).free
    if free < needed + headers:
        reason = f"no space: the arrays take {size_in_words(needed)} and {size_in_words(free)} are free"
        raise OSError(errno.ENOSPC, reason, str(file))


def _write_shard(file: Path, arrays: Iterable[tuple[str, np.ndarray]], notes: Mapping[str, str]) -> None:
    held = {path: np.asarray(x, order="C") for path, x in arrays}
    file.touch()
    mode = file.stat().st_mode  # by the umask; the library's files are readable only for the owner
    try:
        save_file(held, file, {"format": "pt", **notes})  # transformers rejects files without a known format
    except SafetensorError as error:
        raise OSError(errno.EIO, f"it could not be written: {error}", str(file)) from error
    file.chmod(mode)


def _write_index(file: Path, shards: Mapping[Path, Sequence[str]], total_bytes: int) -> None:
    places = {path: shard.name for shard, paths in shards.items() for path in paths}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": places}
    replace(file, json.dumps(index, indent=2, sort_keys=True) + "\n")


def _publish(folder: Path, file: Path, targets: Sequence[Path]) -> None:
    """Moves the files to their destinations, in order; if one fails, deletes those already moved."""
    check_free(file, index_of(file), *targets)
    sync_tree(folder)
    moved: list[Path] = []
    try:
        for target in targets:
            publish(folder / target.name, target)
            moved.append(target)
        sync_folder(file.absolute().parent)
    except BaseException:
        for target in moved:
            target.unlink()
        raise
