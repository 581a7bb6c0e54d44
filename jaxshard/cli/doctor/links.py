"""Runs collectives over all devices, checks their results, and times them."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.hardware.chips import ring_bytes

KINDS = ("all-reduce", "all-gather", "reduce-scatter")
_AXIS = "all"
_LARGEST = 97  # small integers, so that float32 sums are exact in any order
_RUNS, _SECONDS = 10, 1.0  # the most of each collective


class Exchange(NamedTuple):
    """A collective over all devices.

    Attributes:
        kind: one of `KINDS`.
        bytes: payload, as in `inspect.Collective`.
        seconds: the median.
        bytes_per_second: the bytes that each device sends by the ring formula, divided by the time.
        wrong: what is wrong in the results; "" if they are right.
    """

    kind: str
    bytes: int
    seconds: float
    bytes_per_second: float
    wrong: str


def exchanges(devices: Sequence[Any], sizes: Sequence[int]) -> Iterator[Exchange]:
    """Runs each kind of collective over the devices, with payloads of about `sizes` bytes."""
    mesh = jax.sharding.Mesh(np.array(devices), (_AXIS,))
    for size in sizes:
        for kind in KINDS:
            yield _exchange(kind, mesh, max(1, size // 4 // mesh.size) * mesh.size)


def _exchange(kind: str, mesh: jax.sharding.Mesh, num_elements: int) -> Exchange:
    """Runs one collective on `num_elements` float32 numbers, a multiple of the number of devices."""
    given = _given(mesh.size, num_elements // (mesh.size if kind == "all-gather" else 1))
    x = jax.make_array_from_callback(given.shape, NamedSharding(mesh, P(_AXIS)), lambda index: given[index])
    run = jax.jit(jax.shard_map(_RUNS_OF[kind], mesh=mesh, in_specs=P(_AXIS), out_specs=P(_AXIS), check_vma=False))
    result = jax.block_until_ready(run(x))
    seconds = _timed(lambda: jax.block_until_ready(run(x)))
    sent = ring_bytes(kind, 4 * num_elements, mesh.size)
    return Exchange(kind, 4 * num_elements, seconds, sent / seconds, _wrong(result, _EXPECTED[kind](given)))


def _given(num_devices: int, num_elements: int) -> np.ndarray:
    """A different row for each device."""
    rows, columns = np.arange(num_devices)[:, None], np.arange(num_elements)[None, :]
    return ((31 * rows + columns) % _LARGEST).astype(np.float32)


# The collective on each device's row, (1, elements), and the expected rows of all devices.
_RUNS_OF: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "all-reduce": lambda row: lax.psum(row, _AXIS),
    "all-gather": lambda row: lax.all_gather(row, _AXIS, axis=1, tiled=True),
    "reduce-scatter": lambda row: lax.psum_scatter(row, _AXIS, scatter_dimension=1, tiled=True),
}
_EXPECTED: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "all-reduce": lambda given: np.broadcast_to(given.sum(0), given.shape),
    "all-gather": lambda given: np.broadcast_to(given.reshape(-1), (len(given), given.size)),
    "reduce-scatter": lambda given: given.sum(0).reshape(len(given), -1),
}


def _timed(call: Callable[[], object]) -> float:
    """The median of several runs, in seconds."""
    taken: list[float] = []
    while len(taken) < _RUNS and sum(taken) < _SECONDS:
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _wrong(result: jax.Array, expected: np.ndarray) -> str:
    """The differences on this process's devices, in words; "" if there are none."""
    for shard in result.addressable_shards:
        found, right = np.asarray(shard.data), expected[shard.index]
        if not np.array_equal(found, right):
            places = np.argwhere(found != right)
            first = tuple(places[0])
            return (
                f"device {shard.device.id} has {found[first]:g} instead of {right[first]:g}, in {len(places):,} of "
                f"{found.size:,} elements"
            )
    return ""
