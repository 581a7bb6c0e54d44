"""PartitionSpecs as the user gives them: how the model's own axes shard the params, and how a batch is cut."""

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeGuard

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.base.tree import first_rules, named_leaves, names_of, path_of
from jaxshard.base.types import AnyMesh, AxisSizes, Names, T, Tree, TreeDef, axes_in, axes_of, canonical, num_along
from jaxshard.layout.options import Config, Rules
from jaxshard.system.text import nearest


class ModelSpecs(NamedTuple):
    """One canonical PartitionSpec per leaf; `unused` is the error of a rule or spec that matches no leaf, or ""."""

    specs: list[P]
    unused: str = ""


def model_specs(config: Config, params: Tree, sizes: AxisSizes) -> ModelSpecs:
    """The PartitionSpec of each leaf of `params` over the model's axes, from a tree, a prefix or rules.

    A rule or spec that matches no leaf is reported in `unused`, not raised: a masked tree may lack leaves.

    Raises:
      TypeError: a leaf of the specs is not a PartitionSpec.
      ValueError: a spec does not fit its leaf, a leaf has no spec, or a rule is not a regular expression.
    """
    leaves = named_leaves(params)
    if config.specs is None:
        return ModelSpecs([P()] * len(leaves))
    names = [names for names, _ in leaves]
    if is_rules(config.specs):
        specs, unused = _by_rule(config.specs, names)
    else:
        absent = "the parameter {} is missing; add a PartitionSpec for it"
        specs, unused = by_tree("specs", _given("specs", config.specs), names, absent)
    for (names, leaf), spec in zip(leaves, specs, strict=True):
        _check_spec(path_of(names), tuple(leaf.shape), spec, sizes, config)
    return ModelSpecs([canonical(spec) for spec in specs], unused)


def is_rules(specs: Tree) -> TypeGuard[Rules]:
    """Whether `specs` is a list of pairs that begin with a string, and so are meant as (regex, PartitionSpec)."""
    return (
        isinstance(specs, list | tuple)
        and not isinstance(specs, P)
        and all(isinstance(rule, list | tuple) and len(rule) == 2 and isinstance(rule[0], str) for rule in specs)
    )


def _by_rule(rules: Rules, leaves: list[Names]) -> tuple[list[P], str]:
    for pattern, spec in rules:
        if not isinstance(spec, P):
            raise TypeError(
                f"specs: the rule {(pattern, spec)!r:.80} needs a PartitionSpec: ({pattern!r}, P({spec!r}))"
            )
    return by_rules("specs", rules, leaves, P())


def _given(what: str, specs: Tree) -> dict[Names, P]:
    """Key path -> spec, for a tree of PartitionSpecs; so boxes and metadata do not matter."""

    def is_spec(x: object) -> bool:
        return x is None or isinstance(x, P | optax.MaskedNode)

    given: dict[Names, P] = {}
    for path, spec in jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)[0]:
        if not is_spec(spec):
            raise TypeError(
                f"{what}: {_whose(names_of(path))} is a {type(spec).__name__}; give a PartitionSpec"
                f"{', or rules [(regex, PartitionSpec), ...]' if what == 'specs' else ''}"
            )
        given[names_of(path)] = spec if isinstance(spec, P) else P()
    return given


def _whose(names: Names) -> str:
    return path_of(names) if names else "the value"


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
        num_shards = math.prod(sizes[axis] for axis in axes_in(entry))
        if shape[dim] % num_shards:
            raise ValueError(
                f"specs: {path} has {spec} for shape {shape}: dim {dim} of {shape[dim]} is not divisible by "
                f"{num_shards} ({entry!r}); pad it to {-(-shape[dim] // num_shards) * num_shards}, or shard a "
                "different dim"
            )


def by_rules(what: str, rules: Sequence[tuple[str, T]], leaves: Sequence[Names], otherwise: T) -> tuple[list[T], str]:
    """(for each leaf, the value of the first rule that matches its path; the error of an unused rule, or "")."""
    paths = ["/".join(names) for names in leaves]
    found, idle = first_rules(what, [rule for rule, _ in rules], paths)
    wrong = ""
    if idle is not None:
        near = difflib.get_close_matches(idle, paths, n=3, cutoff=0.0)
        wrong = f"{what}: the rule {idle!r} matches no parameter; correct it or leave it out. The nearest paths: {near}"
    return [otherwise if i is None else rules[i][1] for i in found], wrong


def by_tree(what: str, given: Mapping[Names, T], leaves: Sequence[Names], absent: str) -> tuple[list[T], str]:
    """(for each leaf, the value that is given at its path, or above it; the error of an unused value, or "").

    Raises:
      ValueError: nothing is given for a leaf; `absent` is the message, with {} for its path.
    """
    places = [next((names[:n] for n in range(len(names), -1, -1) if names[:n] in given), None) for names in leaves]
    for names, place in zip(leaves, places, strict=True):
        if place is None:
            raise ValueError(f"{what}: {absent.format(path_of(names))}")
    extra = next((names for names in given if names not in places), None)
    wrong = "" if extra is None else f"{what}: {path_of(extra)} is not a parameter; leave it out, or correct its path"
    return [given[place] for place in places if place is not None], wrong


# Batches.


class BatchCut:
    """How the leaves of a batch are cut: along the rows by all axes that split a batch, or as `batch_specs` say.

    Attributes:
      row_axes: the axes that cut the first dim, the rows.
      other_axes: those larger than 1 that cut other dims: sequences, say.
      num_row_parts: the number of parts of the rows.
    """

    def __init__(self, what: str, specs: Tree, mesh: AnyMesh, axes: Names):
        """`specs`: a PartitionSpec, a tree of them, a prefix of the batch, or None. `what` names them in errors.

        Raises:
          TypeError: a leaf of the specs is not a PartitionSpec.
          ValueError: one names an axis that does not split the batch, or twice; the first entries differ; or no leaf is
            cut along an axis that splits the batch.
        """
        self._what, self._mesh, self._sizes = what, mesh, dict(mesh.shape)
        given = {(): P(axes)} if specs is None else _given(what, specs)
        self._given = {names: canonical(spec) for names, spec in given.items()}
        self._shardings = dict[TreeDef, list[NamedSharding]]()
        for names, spec in self._given.items():
            self._check_names(_whose(names), spec, axes)
        by_rows = [axes_in(spec[0]) if len(spec) else () for spec in self._given.values()]
        others = {axis for spec in self._given.values() for axis in axes_of(P(*spec[1:]))}
        self.row_axes = by_rows[0] if by_rows else ()
        self.other_axes = tuple(axis for axis in axes if axis in others and self._sizes[axis] > 1)
        self.num_row_parts = num_along(self.row_axes, self._sizes)
        if len(set(by_rows)) > 1:
            raise ValueError(
                f"{what}: the first entries differ, {sorted(set(by_rows))}, so a device would get different rows of "
                "different leaves; give every spec the same first entry"
            )
        idle = [axis for axis in axes if self._sizes[axis] > 1 and axis not in {*self.row_axes, *others}]
        if idle:
            raise ValueError(
                f"{what}: no leaf is cut along {idle}, so the devices along it would compute the same; the optimizer "
                f"splits a batch over {axes}: name each of them in a dim of some leaf, as in {P(axes[0], idle[0])}"
            )

    def _check_names(self, path: str, spec: P, axes: Names) -> None:
        used = [axis for entry in spec for axis in axes_in(entry)]
        for axis in used:
            if axis not in axes:
                raise ValueError(
                    f"{self._what}: {path} has {spec}, and {axis!r} is not an axis that splits the batch: these are "
                    f"{axes}{nearest(str(axis), axes)}; name it in data_axes= of the optimizer, or leave it out"
                )
        if len(set(used)) < len(used):
            raise ValueError(f"{self._what}: {path} has {spec}, which uses an axis twice; use each axis once")

    def specs(self, batch: Tree) -> list[P]:
        """The PartitionSpec of each leaf.

        Raises:
          ValueError: a leaf has no spec, or a spec no leaf.
        """
        if () in self._given:
            return [self._given[()]] * len(jax.tree.leaves(batch))
        names = [names for names, _ in named_leaves(batch)]
        found, wrong = by_tree(self._what, self._given, names, "the leaf {} is missing; add a PartitionSpec for it")
        if wrong:
            raise ValueError(wrong.replace("a parameter", "a leaf of the batch"))
        return found

    def tree(self, batch: Tree) -> Tree:
        """The PartitionSpecs as a tree like the batch."""
        return jax.tree.unflatten(jax.tree.structure(batch), self.specs(batch))

    def shardings(self, batch: Tree) -> Tree:
        """The same as `NamedSharding`s."""
        treedef = jax.tree.structure(batch)
        if treedef not in self._shardings:
            self._shardings[treedef] = [NamedSharding(self._mesh, spec) for spec in self.specs(batch)]  # pyright: ignore
        return jax.tree.unflatten(treedef, self._shardings[treedef])

    def named(self, batch: Tree) -> list[tuple[Names, Tree, P]]:
        """(path, leaf, spec) of each leaf.

        Raises:
          ValueError: a spec has more entries than its leaf has dims.
        """
        each = zip(named_leaves(batch), self.specs(batch), strict=True)
        found = [(names, leaf, spec) for (names, leaf), spec in each]
        for names, leaf, spec in found:
            if len(spec) > max(np.ndim(leaf), 1):
                raise ValueError(
                    f"{self._what}: {path_of(names)} has shape {np.shape(leaf)}, and is to be cut by {spec}: give this "
                    f"leaf a spec of its own, as in {{{(names or ('x',))[-1]!r}: {P(spec[0])}, ...}}"
                )
        return found
