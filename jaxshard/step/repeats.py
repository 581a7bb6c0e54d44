"""Warns of equal values that should differ: random keys at every step, and the rows of all processes."""

import hashlib
import itertools
import json
from collections.abc import Callable, Hashable, Sequence

import jax
import numpy as np

from jaxshard.base.tree import Names, is_key, is_like_raw_key, named_leaves
from jaxshard.base.types import Tree
from jaxshard.processes import agreement
from jaxshard.system.users_lines import warn

_CALLS = 3
_SMALL = 64  # elements


class KeyWatch:
    """Compares the further arguments of a step's first calls; later calls cost nothing.

    A key counts as repeated only if all integers repeat too, since it may be folded with them (nnx counts draws).
    """

    def __init__(self):
        self._seen: list[tuple[Hashable, ...]] = []
        self._batches: list[list[Tree]] = []

    def look(self, batch: Tree, args: tuple[Tree, ...], is_drawn_from: Callable[[], Sequence[bool]]) -> None:
        """Warns at the third call if the keys among `args` were the same in all three.

        `is_drawn_from` returns for each leaf of `args` whether random numbers depend on it; it is called only then.
        """
        if len(self._seen) == _CALLS or not args:
            return
        self._seen.append(tuple(_value(leaf) for leaf in jax.tree.leaves(args) if _counts(leaf)))
        self._batches.append(jax.tree.leaves(batch))
        if len(self._seen) < _CALLS:
            return
        batches, self._batches = self._batches, []
        keys = [_is_key(leaf) for leaf in jax.tree.leaves(args)]
        if len(set(self._seen)) > 1 or _are_one(batches) or not any(keys):
            return
        used = [key and drawn for key, drawn in zip(keys, is_drawn_from(), strict=True)]
        if any(used):
            _warn(named_leaves(args)[used.index(True)][0])


def _warn(names: Names) -> None:
    position, *rest = names
    warn(
        f"train_step: further argument {position}{': ' + '/'.join(rest) if rest else ''} is the same random key at "
        "every call, so that every step draws the same numbers (dropout masks). Pass another key at each step, such as "
        'jax.random.fold_in(key, i); or, if the loss returns its random state as aux, hand metrics["aux"] to the next '
        'step. If the numbers are to stay, give train_step loss_view="local"'
    )


def _is_key(leaf: Tree) -> bool:
    return is_key(leaf) or is_like_raw_key(leaf)


def _counts(leaf: Tree) -> bool:
    return isinstance(leaf, int) or is_key(leaf) or np.issubdtype(getattr(leaf, "dtype", np.float32), np.integer)


def _value(leaf: Tree) -> Hashable:
    """The numbers of a small leaf, or the identity of a large one."""
    if np.size(leaf) > _SMALL or not getattr(leaf, "is_fully_replicated", True):
        return id(leaf)
    data = jax.random.key_data(leaf) if is_key(leaf) else leaf
    return np.asarray(data).tobytes()


def _are_one(batches: list[list[Tree]]) -> bool:
    """Whether all calls had the very same arrays as their batch, as in a time measurement."""
    return all(len({id(leaf) for leaf in column}) == 1 for column in zip(*batches, strict=False))


def warn_of_same_rows(batch: Tree) -> None:
    """Warns, on process 0, if two processes gave equal rows for different places in the global batch.

    Processes that hold the same places, such as those of one pipeline, are not compared; nor are batches whose rows are
    all equal, such as ones for a measurement.
    """
    said = agreement.gathered("train_step: the batch's rows", json.dumps(_own_rows(batch)))
    found = [json.loads(text) for text in said]
    for (i, one), (j, two) in itertools.combinations(enumerate(found), 2):
        if one["digest"] == two["digest"] is not None and not set(one["places"]) & set(two["places"]):
            if jax.process_index() == 0:
                warn(
                    f"train_step: processes {i} and {j} gave the same rows of the batch, bit for bit: each process "
                    "should load rows of its own, by jax.process_index() as its seed or its part of the data, and give "
                    "these alone to jaxshard.shard_batch(rows, opt)"
                )
            return


def _own_rows(batch: Tree) -> dict[str, Tree]:
    """The places of this process's rows in the global batch, and their digest, None if all rows are equal."""
    digest, places, differ = hashlib.sha256(), set[int](), False
    for leaf in jax.tree.leaves(batch):
        x = jax.random.key_data(leaf) if is_key(leaf) else leaf
        shards = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
        rows = np.concatenate([np.asarray(shards[start]) for start in sorted(shards)])
        places |= shards.keys()
        digest.update(rows.tobytes())
        differ |= bool((rows != rows[:1]).any()) or (len(rows) == 1 and len(set(rows.ravel().tolist()[:1000])) > 1)
    return {"places": sorted(places), "digest": digest.hexdigest() if differ else None}
