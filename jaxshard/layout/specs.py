"""PartitionSpecs: how the model's own axes cut the params, as the user says it."""

import difflib
import math
import re
from typing import NamedTuple, TypeGuard

import jax
import optax
from jax.sharding import PartitionSpec as P

from jaxshard.base.axes import axes_in, canonical
from jaxshard.base.tree import Names, named_leaves, names_of, path_of
from jaxshard.base.types import AxisSizes, Tree
from jaxshard.layout.options import Config, Rules
from jaxshard.system.text import nearest


class ModelSpecs(NamedTuple):
    """One canonical PartitionSpec per leaf; `unused` is a message about one that matches no leaf, or empty."""

    specs: list[P]
    unused: str = ""


def model_specs(config: Config, params: Tree, sizes: AxisSizes) -> ModelSpecs:
    """The PartitionSpec of each leaf of `params` over the model's axes, from a tree, a prefix or rules.

    A rule or spec that matches no leaf is reported in `unused`, not raised: a masked tree may lack leaves.

    Raises:
      TypeError: a leaf of the specs that is no PartitionSpec.
      ValueError: a spec that does not fit its leaf, a leaf without a spec, or a rule that is no regular expression.
    """
    leaves = named_leaves(params)
    if config.specs is None:
        return ModelSpecs([P()] * len(leaves))
    specs, unused = _by_rule(config.specs, leaves) if is_rules(config.specs) else _by_tree(config.specs, leaves)
    for (names, leaf), spec in zip(leaves, specs, strict=True):
        _check_spec(path_of(names), tuple(leaf.shape), spec, sizes, config)
    return ModelSpecs([canonical(spec) for spec in specs], unused)


def is_rules(specs: Tree) -> TypeGuard[Rules]:
    """Whether `specs` is a list of pairs that begin with a text, and so are meant as (regex, PartitionSpec)."""
    return (
        isinstance(specs, list | tuple)
        and not isinstance(specs, P)
        and all(isinstance(rule, list | tuple) and len(rule) == 2 and isinstance(rule[0], str) for rule in specs)
    )


def _by_rule(rules: Rules, leaves: list[tuple[Names, Tree]]) -> ModelSpecs:
    paths = ["/".join(names) for names, _ in leaves]
    for pattern, spec in rules:
        if not isinstance(spec, P):
            raise TypeError(
                f"specs: the rule {(pattern, spec)!r:.80} needs a PartitionSpec: ({pattern!r}, P({spec!r}))"
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"specs: the rule {pattern!r} is no regular expression: {error}; mend it") from None
    unmatched = next((pattern for pattern, _ in rules if not any(re.search(pattern, path) for path in paths)), None)
    unused = ""
    if unmatched is not None:
        near = difflib.get_close_matches(unmatched, paths, n=3, cutoff=0.0)
        unused = f"specs: the rule {unmatched!r} matches no parameter; mend or drop it. The nearest paths: {near}"
    return ModelSpecs(
        [next((spec for pattern, spec in rules if re.search(pattern, path)), P()) for path in paths], unused
    )


def _by_tree(specs: Tree, leaves: list[tuple[Names, Tree]]) -> ModelSpecs:
    """Matches specs to leaves by key path, so that boxes and metadata in either tree do not matter."""
    given = _given(specs)
    found, used = [], set[Names]()
    for names, _ in leaves:
        prefix = next((names[:n] for n in range(len(names), -1, -1) if names[:n] in given), None)
        if prefix is None:
            raise ValueError(f"specs: nothing is given for the parameter {path_of(names)}; add a PartitionSpec for it")
        used.add(prefix)
        found.append(given[prefix])
    extra = next((names for names in given if names not in used), None)
    unused = "" if extra is None else f"specs: {path_of(extra)} is no parameter; drop it, or mend its path"
    return ModelSpecs(found, unused)


def _given(specs: Tree) -> dict[Names, P]:
    """The spec at each key path of a tree of PartitionSpecs."""

    def is_spec(x: object) -> bool:
        return x is None or isinstance(x, P | optax.MaskedNode)

    given: dict[Names, P] = {}
    for path, spec in jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)[0]:
        if not is_spec(spec):
            raise TypeError(
                f"specs: {path_of(names_of(path))} is a {type(spec).__name__}; give a PartitionSpec, or rules "
                "[(regex, PartitionSpec), ...]"
            )
        given[names_of(path)] = spec if isinstance(spec, P) else P()
    return given


def _check_spec(path: str, shape: tuple[int, ...], spec: P, sizes: AxisSizes, config: Config) -> None:
    used = [axis for entry in spec for axis in axes_in(entry)]
    for axis in used:
        if axis not in sizes:
            raise ValueError(
                f"specs: {path} names the axis {axis!r}; the mesh has {tuple(sizes)}{nearest(axis, sizes)}"
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
