"""PartitionSpecs: how the model's own axes cut the params, as the user says it."""

import difflib
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec as P

from jaxshard.base.tree import Names, named_leaves, names_of, path_of
from jaxshard.mesh import REPLICA_AXIS


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


def model_specs(config: Any, params: Any, sizes: Mapping[str, int], *, strict: bool = False) -> list[P]:
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


def axes_of(specs: Any) -> set[str]:
    """All axes that a tree of PartitionSpecs, or rules, name."""
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
    return {axis for spec in leaves if isinstance(spec, P) for entry in spec for axis in axes_in(entry)}


def without(spec: P, axes: Names) -> P:
    """A PartitionSpec that says nothing of these axes."""
    return canonical(tuple(axis for axis in axes_in(entry) if axis not in axes) for entry in spec)


def _by_rule(rules: Any, leaves: list[tuple[Names, Any]], strict: bool) -> list[P]:
    paths = ["/".join(names) for names, _ in leaves]
    for pattern, _ in rules:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"specs: the rule {pattern!r} is no regular expression: {error}; mend it") from None
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
        return x is None or isinstance(x, P | optax.MaskedNode)

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


def _check_spec(path: str, shape: tuple[int, ...], spec: P, sizes: Mapping[str, int], config: Any) -> None:
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
