"""Where each leaf of params, grads and state lives: pure, from shapes, dtypes, options and the mesh's axis sizes.

Nothing here touches an array or a device, so everything can be asked before any machine is rented.
"""

import dataclasses
import difflib
import itertools
import math
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from jaxshard.mesh import REPLICA_AXIS

Names = tuple[str, ...]


class Cuts(NamedTuple):
    """What a strategy cuts 1/N over the data axes."""

    params: bool
    accumulators: bool  # gradients, while microbatches are summed
    state: bool  # and the gradients that reach the inner optimizer


STRATEGIES = {
    "ddp": Cuts(params=False, accumulators=False, state=False),
    "zero1": Cuts(params=False, accumulators=False, state=True),
    "zero2": Cuts(params=False, accumulators=True, state=True),
    "zero3": Cuts(params=True, accumulators=True, state=True),
    "hsdp": Cuts(params=True, accumulators=True, state=True),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The options of a strategy, as given to `zero2(...)` and its siblings."""

    strategy: str
    specs: Any = dataclasses.field(default=None, hash=False)
    data_axes: Names = ("data",)
    min_shard_size: int = 2**11
    reduce_dtype: Any = None
    master_dtype: Any = None

    @property
    def cuts(self) -> Cuts:
        return STRATEGIES[self.strategy]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf: `spec` over the model's axes alone, `cut` with the data axes added, and why it is so."""

    names: Names
    shape: tuple[int, ...]
    dtype: Any
    spec: P
    cut: P
    dims: tuple[tuple[int, Names], ...]  # (dim counted from the end, data axes that cut it)
    ways: int
    reason: str
    awkward: bool = False  # larger than min_shard_size, and no dims to cut it all N ways

    @property
    def path(self) -> str:
        return path_of(self.names)

    def bytes(self, spec: P, sizes: Mapping[str, int]) -> int:
        """Bytes of one device's part under `spec`."""
        return math.prod(local_shape(self.shape, spec, sizes)) * np.dtype(_plain(self.dtype)).itemsize


class Shardings(NamedTuple):
    """`NamedSharding`s of params, grads (as `value_and_grad` returns them) and state; `.specs` has the specs alone."""

    params: Any
    grads: Any
    state: Any

    @property
    def specs(self) -> "Shardings":
        return Shardings(*jax.tree.map(lambda sharding: sharding.spec, tuple(self)))


def names_of(path: Iterable[Any]) -> Names:
    """The names on a key path; the trailing `.value` of nnx variables and boxed linen params is dropped.

    >>> names_of(jax.tree_util.tree_flatten_with_path({"a": [1]})[0][0][0])
    ('a', '0')
    """
    path = tuple(path)
    if path and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def path_of(names: Names) -> str:
    return "/".join(names) or "(the whole tree)"


def named_leaves(tree: Any) -> list[tuple[Names, Any]]:
    return [(names_of(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _is_masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)


def _plain(dtype: Any) -> Any:
    """A NumPy dtype of the same width for PRNG keys, whose own NumPy does not know."""
    return np.dtype(f"V{dtype.itemsize}") if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else dtype


def axes_in(entry: Any) -> Names:
    """The axes named by one entry of a PartitionSpec."""
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


def canonical(entries: Iterable[Any]) -> P:
    """A PartitionSpec without trailing Nones (P("data", None) would cost a second compilation)."""
    spec = [axes[0] if len(axes) == 1 else axes or None for axes in map(axes_in, entries)]
    while spec and spec[-1] is None:
        spec.pop()
    return P(*spec)


def local_shape(shape: tuple[int, ...], spec: P, sizes: Mapping[str, int]) -> tuple[int, ...]:
    ways = [math.prod(sizes[axis] for axis in axes_in(entry)) for entry in spec]
    return tuple(size // n for size, n in itertools.zip_longest(shape, ways, fillvalue=1))


# The rule: where one leaf is cut.


def cut_leaf(
    names: Names, shape: tuple[int, ...], dtype: Any, spec: P, sizes: Mapping[str, int], config: Config
) -> Leaf:
    """Decides where the data axes cut a leaf (DESIGN section 4).

    Dims that `spec` uses are taken. Among the rest: the last dim if shards are multiples of 128, else the second last
    if multiples of 8, else any; a stacked-layers dim (the first of three or more) last of all. Each data axis may cut
    a dim of its own. What cannot be cut N ways is cut as many ways as it can be.
    """
    data_sizes = {axis: sizes[axis] for axis in config.data_axes if sizes[axis] > 1}
    num_shards, size = math.prod(data_sizes.values()), math.prod(shape)
    whole = Leaf(names, shape, dtype, spec, cut=spec, dims=(), ways=1, reason="")
    if num_shards == 1:
        return dataclasses.replace(whole, reason="one data device")
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return dataclasses.replace(whole, reason="a PRNG key")
    if size < max(config.min_shard_size, 1):
        return dataclasses.replace(whole, reason=f"{size} elements, under min_shard_size {config.min_shard_size}")
    free = [dim for dim in range(len(shape)) if dim >= len(spec) or spec[dim] is None]
    assignments = itertools.product([None, *free], repeat=len(data_sizes))
    candidates = [dims for a in assignments if (dims := _assign(a, shape, data_sizes)) is not None]
    best = min(candidates, key=lambda dims: _badness(dims, shape, data_sizes))
    ways = math.prod(data_sizes[axis] for axes in best.values() for axis in axes)
    if ways == 1:
        why = f"no free dim of {shape} is divisible by {' or '.join(str(n) for n in data_sizes.values())}"
        return dataclasses.replace(whole, reason=why, awkward=True)
    entries = list(spec) + [None] * (len(shape) - len(spec))
    for dim, axes in best.items():
        entries[dim] = axes
    where = " and ".join(f"dim {dim} by {'x'.join(axes)}" for dim, axes in sorted(best.items()))
    dims = tuple((dim - len(shape), axes) for dim, axes in sorted(best.items()))
    return dataclasses.replace(
        whole,
        cut=canonical(entries),
        dims=dims,
        ways=ways,
        reason=where if ways == num_shards else f"{where}: only {ways} of {num_shards} ways",
        awkward=ways < num_shards,
    )


def _assign(
    assignment: tuple[int | None, ...], shape: tuple[int, ...], data_sizes: Mapping[str, int]
) -> dict[int, Names] | None:
    """dim -> data axes that cut it, or None where a dim does not divide."""
    dims: dict[int, Names] = {}
    for axis, dim in zip(data_sizes, assignment, strict=True):
        if dim is not None:
            dims[dim] = (*dims.get(dim, ()), axis)
    divides = all(shape[dim] % math.prod(data_sizes[a] for a in axes) == 0 for dim, axes in dims.items())
    return dims if divides else None


def _badness(dims: dict[int, Names], shape: tuple[int, ...], data_sizes: Mapping[str, int]) -> tuple[Any, ...]:
    """Smaller is better: more ways first, then the tiles that accelerators like, then fewer dims."""
    ways = math.prod(data_sizes[axis] for axes in dims.values() for axis in axes)
    ranks = []
    for dim, axes in dims.items():
        shard = shape[dim] // math.prod(data_sizes[axis] for axis in axes)
        ranks.append(_rank(dim - len(shape), len(shape), shard))
    return (-ways, max(ranks, default=0), sum(ranks), len(dims), sorted(dims, reverse=True))


def _rank(dim: int, ndim: int, shard: int) -> int:
    """How good a dim (counted from the end) is to cut into shards of this size: 0 is best."""
    if dim == -1:
        return 0 if shard % 128 == 0 else 4
    if dim == -ndim and ndim >= 3:
        return 5  # stacked layers: cutting these would gather all layers at once
    if dim == -2:
        return 1 if shard % 8 == 0 else 2
    return 3


# What the user says about the model's own axes.


def model_specs(config: Config, params: Any, sizes: Mapping[str, int], *, strict: bool = False) -> list[P]:
    """One canonical PartitionSpec per leaf of `params`, from a tree, a prefix or rules; see `Config.specs`.

    With `strict`, a rule or a spec that matches no leaf is an error (a masked tree may lack leaves, a whole one not).
    """
    leaves = named_leaves(params)
    if config.specs is None:
        return [P()] * len(leaves)
    specs = _by_rule(config.specs, leaves, strict) if is_rules(config.specs) else _by_tree(config.specs, params, strict)
    for (names, leaf), spec in zip(leaves, specs, strict=True):
        _check_spec(path_of(names), tuple(leaf.shape), spec, sizes, config)
    return [canonical(spec) for spec in specs]


def is_rules(specs: Any) -> bool:
    """Whether `specs` is a list of (regex, PartitionSpec) pairs."""
    return isinstance(specs, list | tuple) and all(
        isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[0], str) and isinstance(rule[1], P)
        for rule in specs
    )


def _by_rule(rules: Any, leaves: list[tuple[Names, Any]], strict: bool) -> list[P]:
    paths = ["/".join(names) for names, _ in leaves]
    for pattern, _ in rules if strict else ():
        if not any(re.search(pattern, path) for path in paths):
            near = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.0)
            raise ValueError(
                f"specs: the rule {pattern!r} matches no parameter; mend or drop it. The nearest paths: {near}"
            )
    return [next((spec for pattern, spec in rules if re.search(pattern, path)), P()) for path in paths]


def _by_tree(specs: Any, params: Any, strict: bool) -> list[P]:
    """Matches by key path, so that boxes and metadata around either tree do not matter."""

    def is_spec(x: Any) -> bool:
        return x is None or isinstance(x, P) or _is_masked(x)

    given: dict[Names, Any] = {}
    for path, spec in jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)[0]:
        if not is_spec(spec):
            raise TypeError(
                f"specs: {path_of(names_of(path))} is a {type(spec).__name__}; give a PartitionSpec, or rules "
                "[(regex, PartitionSpec), ...]"
            )
        given[names_of(path)] = spec if isinstance(spec, P) else P()
    found, used = [], set()
    for names, _ in named_leaves(params):
        prefix = next((names[:n] for n in range(len(names), -1, -1) if names[:n] in given), None)
        if prefix is None:
            raise ValueError(f"specs: nothing is given for the parameter {path_of(names)}; add a PartitionSpec for it")
        used.add(prefix)
        found.append(given[prefix])
    unused = [names for names in given if names not in used]
    if strict and unused:
        raise ValueError(f"specs: {path_of(unused[0])} is no parameter; drop it, or mend its path")
    return found


def _check_spec(path: str, shape: tuple[int, ...], spec: P, sizes: Mapping[str, int], config: Config) -> None:
    used = [axis for entry in spec for axis in axes_in(entry)]
    for axis in used:
        if axis not in sizes:
            near = difflib.get_close_matches(axis, sizes, n=1, cutoff=0.0)
            raise ValueError(
                f"specs: {path} names the axis {axis!r}; the mesh has {tuple(sizes)}" + f" (did you mean {near[0]!r}?)"
            )
        if axis in (*config.data_axes, REPLICA_AXIS):
            raise ValueError(
                f"specs: {path} has {spec}, but {axis!r} is the strategy's own: it cuts by it where it should; "
                "name only the model's axes (tensor, pipeline)"
            )
    if len(set(used)) < len(used):
        raise ValueError(f"specs: {path} has {spec}, which uses an axis twice; use each axis once")
    if len(spec) > len(shape):
        raise ValueError(f"specs: {path} has {spec} for {len(shape)} dims {shape}; give at most one entry per dim")
    for dim, entry in enumerate(spec):
        ways = math.prod(sizes[axis] for axis in axes_in(entry))
        if shape[dim] % ways:
            raise ValueError(
                f"specs: {path} has {spec} for shape {shape}: dim {dim} of {shape[dim]} is not divisible by "
                f"{ways} ({entry!r}); pad it to {-(-shape[dim] // ways) * ways}, or cut another dim"
            )


# Whole trees.


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where everything of one optimizer lives; `print(layout)` is the table, one row per leaf."""

    config: Config
    sizes: Mapping[str, int]
    params: tuple[Leaf, ...]
    state: tuple[Leaf, ...] = ()
    gathers: Mapping[Names, str] | None = None  # params' names -> where and why they are gathered

    def spec(self, leaf: Leaf, *, cut: bool) -> P:
        return leaf.cut if cut else leaf.spec

    @property
    def bytes_per_device(self) -> dict[str, int]:
        """Bytes at rest on each device: params, grads (as the inner optimizer gets them) and state."""
        cuts = self.config.cuts
        return {
            "params": sum(leaf.bytes(self.spec(leaf, cut=cuts.params), self.sizes) for leaf in self.params),
            "grads": sum(leaf.bytes(self.spec(leaf, cut=cuts.state), self.sizes) for leaf in self.params),
            "state": sum(leaf.bytes(self.spec(leaf, cut=cuts.state), self.sizes) for leaf in self.state),
        }

    def rows(self) -> list[tuple[str, ...]]:
        """The table's rows: kind, leaf, shape, dtype, spec at rest, bytes per device, why."""
        cuts, rows = self.config.cuts, []
        for kind, leaves, cut in (("params", self.params, cuts.params), ("state", self.state, cuts.state)):
            for leaf in leaves:
                spec = self.spec(leaf, cut=cut)
                why = leaf.reason if cut else f"{self.config.strategy} keeps {kind} whole"
                if kind == "params" and self.gathers is not None:
                    why += f"; {self.gathers[leaf.names]}"
                dtype = str(leaf.dtype)
                rows.append((kind, leaf.path, str(leaf.shape), dtype, str(spec), leaf.bytes(spec, self.sizes), why))
        return [tuple(map(str, row)) for row in rows]

    def __str__(self) -> str:
        head = ("", "leaf", "shape", "dtype", "at rest", "bytes/device", "why")
        rows = [head, *self.rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        total = ", ".join(f"{kind} {num_bytes}" for kind, num_bytes in self.bytes_per_device.items())
        return "\n".join([*lines, f"bytes per device: {total}"])


def layout_params(config: Config, params: Any, sizes: Mapping[str, int], *, strict: bool = False) -> Layout:
    """The layout of a tree of arrays or `ShapeDtypeStruct`s.

    Raises:
      TypeError: a leaf is not floating (or complex).
      ValueError: see `model_specs`.
    """
    check_floating(params)
    specs = model_specs(config, params, sizes, strict=strict)
    leaves = tuple(
        cut_leaf(names, tuple(leaf.shape), leaf.dtype, spec, sizes, config)
        for (names, leaf), spec in zip(named_leaves(params), specs, strict=True)
    )
    return Layout(config, dict(sizes), leaves)


def layout_state(params: Layout, state: Any) -> Layout:
    """Adds the leaves of an (abstract) optimizer state.

    A leaf whose path ends in a parameter's path and has its shape follows that parameter's spec; others (counts,
    factored moments) have none. The data axes then cut each by the same rule, so moments lie beside their parameters.
    """
    specs = {leaf.names: leaf for leaf in params.params}
    leaves = []
    for names, leaf in named_leaves(state):
        suffixes = (names[start:] for start in range(len(names) + 1))
        owner = next((specs[suffix] for suffix in suffixes if suffix in specs), None)
        shape = tuple(jnp.shape(leaf))
        spec = owner.spec if owner is not None and owner.shape == shape else P()
        leaves.append(cut_leaf(names, shape, jnp.result_type(leaf), spec, params.sizes, params.config))
    return dataclasses.replace(params, state=tuple(leaves))


def check_floating(params: Any) -> None:
    for names, leaf in named_leaves(params):
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not hasattr(leaf, "shape"):
            raise TypeError(f"params: {path_of(names)} is a {type(leaf).__name__}; every leaf must be an array")
        if not jax.dtypes.issubdtype(dtype, np.inexact):
            raise TypeError(
                f"params: {path_of(names)} has dtype {dtype}, which has no gradient; keep it out of the params "
                "(pass it as a further argument of the loss), or cast it to a floating dtype"
            )


def check_same_structure(what: str, given: Any, params: Any) -> None:
    """Raises a ValueError that names the first difference between two trees' leaves and shapes."""
    one = {names: tuple(jnp.shape(leaf)) for names, leaf in named_leaves(given)}
    two = {names: tuple(jnp.shape(leaf)) for names, leaf in named_leaves(params)}
    for names in [*two, *one]:
        if names not in one:
            raise ValueError(f"{what}: {path_of(names)} is missing; give one leaf for each parameter")
        if names not in two:
            raise ValueError(f"{what}: {path_of(names)} is no parameter; give one leaf for each parameter")
        if one[names] != two[names]:
            raise ValueError(f"{what}: {path_of(names)} has shape {one[names]}, its parameter has {two[names]}")


def warn_if_awkward(layout: Layout) -> None:
    """Warns of leaves too awkward to cut, where they hold more than 1% of a device's bytes."""
    if not layout.config.cuts.state:
        return
    num_shards = math.prod(layout.sizes[axis] for axis in layout.config.data_axes)
    held = {leaf: leaf.bytes(leaf.cut, layout.sizes) for leaf in layout.params}
    awkward = {leaf: num_bytes for leaf, num_bytes in held.items() if leaf.awkward}
    if sum(awkward.values()) <= 0.01 * sum(held.values()):
        return
    lost = {leaf: num_bytes - num_bytes * leaf.ways // num_shards for leaf, num_bytes in awkward.items()}
    named = "; ".join(f"{leaf.path}: {leaf.reason}, {num_bytes} bytes lost" for leaf, num_bytes in lost.items())
    warnings.warn(
        f"{layout.config.strategy}: {len(awkward)} leaves cannot be cut {num_shards} ways, which costs each device "
        f"{sum(lost.values())} bytes for each copy of them (params, grads, moments): {named}. Pad a dim to a multiple "
        f"of {num_shards}, or split the data axis in two (data_axes=('slice', 'data')) so that each cuts its own dim.",
        stacklevel=4,
    )
