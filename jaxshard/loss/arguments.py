"""The arguments of a loss: a batch, whose rows are split, and further arguments, which every device gets in full."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, get_args

import jax
import numpy as np
from jax.sharding import AbstractMesh

from jaxshard.base.tree import is_like_raw_key, named_leaves, path_of
from jaxshard.base.types import AnyMesh, Tree, axes_in, is_whole, num_along, processes_of
from jaxshard.layout.checks import check_flag
from jaxshard.layout.specs import BatchCut
from jaxshard.mesh import check_context, platform_of
from jaxshard.optimizer.sharding import Setup


class PartsError(ValueError):
    """A mistake in a loss that names axes of the mesh, and so is written for each device's rows."""


View: TypeAlias = Literal["auto", "local", "global"]


@dataclasses.dataclass(frozen=True)
class LossOptions:
    """A loss function, the optimizer's setup, and the options of `value_and_grad`."""

    loss_fn: Callable[..., Tree]
    setup: Setup
    has_aux: bool
    microbatches: int
    weighted: bool
    fold_keys: bool
    differentiate: bool = True
    per_row: bool = False  # all of aux has the batch's rows (`predict`)
    loss_view: View = "auto"
    donate: bool | None = True  # whether the step around it takes over params and state; None: see `donates`
    batch_specs: Tree = None  # how the batch is cut; None: by rows over all axes that split it

    @functools.cached_property
    def cut(self) -> BatchCut:
        """How the batch is cut."""
        return BatchCut("batch_specs", self.batch_specs, self.setup.mesh, self.setup.batch_axes)

    @property
    def facts(self) -> dict[str, object]:
        """The loss's name and its options, by name."""
        name = getattr(self.loss_fn, "__name__", type(self.loss_fn).__name__)
        options = ("microbatches", "weighted", "has_aux", "loss_view")
        return {"loss": name, **{option: getattr(self, option) for option in options}}

    @property
    def donates(self) -> bool:
        """Whether the step around it takes over params and state.

        By default not on a single process's CPU devices, where JAX crashes the process if a donated array is used in
        another `jit`. Several processes would take different numbers of steps if a Ctrl-C dropped one of them.
        """
        if self.donate is not None:
            return self.donate
        mesh = self.setup.mesh
        return isinstance(mesh, AbstractMesh) or platform_of(mesh) != "cpu" or len(processes_of(mesh)) > 1

    @property
    def is_meant(self) -> bool:
        """Whether the author says that each device's own rows are meant, whatever the loss does with them."""
        return self.loss_view == "local" or self.setup.config.rows == "mixed"

    @property
    def regathers(self) -> bool:
        """Whether the backward pass gathers params again, instead of keeping them."""
        return self.differentiate and self.setup.config.regather == "backward"

    @property
    def num_parts(self) -> int:
        """The number of parts of the rows that the loss sees one by one."""
        return self.microbatches * (1 if self.loss_view == "global" else self.cut.num_row_parts)

    @property
    def checked(self) -> bool:
        """Whether `shard_map` checks types: only if an axis other than the batch axes and `auto_axes` is larger than 1.

        Over the batch axes our own code makes every sum, so it needs no check. In the global view XLA makes all.
        """
        if self.loss_view == "global":
            return False
        ours = (*self.setup.batch_axes, *self.setup.config.auto_axes)
        return any(size > 1 for axis, size in self.setup.sizes.items() if axis not in ours)


def check_options(who: str, options: LossOptions) -> None:
    """Raises a TypeError if the loss is not a function or a flag not a bool, a ValueError for bad `microbatches`."""
    if not callable(options.loss_fn):
        raise TypeError(f"{who}: the loss {options.loss_fn!r:.80} is not a function (params, batch, *args) -> loss")
    check_flag(who, "donate", options.donate is None or options.donate)
    for name in ("has_aux", "weighted", "fold_keys"):
        check_flag(who, name, getattr(options, name))
    if options.loss_view not in get_args(View):
        raise ValueError(f'{who}: loss_view {options.loss_view!r:.80} must be "auto", "local" or "global"')
    if not is_whole(options.microbatches, 1):
        raise ValueError(f"{who}: microbatches {options.microbatches!r} must be an integer, 1 or more")
    cut = BatchCut(f"{who}: batch_specs", options.batch_specs, options.setup.mesh, options.setup.batch_axes)
    if cut.other_axes and options.loss_view == "global":
        raise ValueError(
            f'{who}: loss_view="global" shows the loss complete rows, but batch_specs cuts them over {cut.other_axes}: '
            "leave one of the two out"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Whole:
    """A further argument that every device should get in full; made by `whole`."""

    tree: Tree


def whole(tree: Tree) -> Whole:
    """Marks a further argument of a loss that every device gets in full, although it has as many rows as the batch.

    Args:
      tree: any tree of arrays.

    Returns:
      The mark to pass in its place; the loss gets the tree itself: `step(params, state, batch, jaxshard.whole(y))`.
    """
    return Whole(tree)


def check_batch(batch: Tree, options: LossOptions) -> None:
    """Raises a ValueError, which names the leaf, if a dim does not divide, or leaves differ in their number of rows."""
    shards, m = options.cut.num_row_parts, options.microbatches
    leaves = named_leaves(batch)
    if not leaves:
        raise ValueError("batch: it has no leaves; give at least one array of (rows, ...)")
    first, num_rows = leaves[0][0], np.shape(leaves[0][1])[:1]
    for names, leaf in leaves:
        rows = np.shape(leaf)[:1]
        if not rows:
            raise ValueError(
                f"batch: {path_of(names)} has shape () and thus no rows: give arrays of (rows, ...), and pass values "
                "without rows as further arguments of the loss"
            )
        if rows[0] % (shards * m) or rows[0] == 0:
            other = ", or change microbatches" if options.differentiate else ""
            raise ValueError(
                f"batch: {path_of(names)} has shape {np.shape(leaf)}; its first dim must be divisible by "
                f"{shards * m} = {shards} data shards x {m} microbatches: give a multiple of {shards * m} rows{other}"
            )
        if rows != num_rows:
            raise ValueError(
                f"batch: {path_of(names)} has {rows[0]} rows and {path_of(first)} has {num_rows[0]}, so unrelated rows "
                "would be paired: give every leaf the same first dim (several items of one row as a second dim), or "
                "pass values without rows as further arguments"
            )
    if options.batch_specs is not None:
        _check_other_dims(batch, options)


def _check_other_dims(batch: Tree, options: LossOptions) -> None:
    for names, leaf, spec in options.cut.named(batch):
        for dim, entry in enumerate(spec[1:], 1):
            parts, size = num_along(axes_in(entry), options.setup.sizes), np.shape(leaf)[dim]
            if size % parts or size == 0:
                raise ValueError(
                    f"batch: {path_of(names)} has shape {np.shape(leaf)}; its dim {dim} must be divisible by {parts} "
                    f"devices over {entry!r}: pad it to {-(-max(size, 1) // parts) * parts}, and let what is padded "
                    "have no weight (weighted=True)"
                )


def check_parts(named: set[str], cut_along: set[str], batch: Tree, options: LossOptions) -> None:
    """Checks that a loss and `batch_specs` agree on how rows are cut.

    Args:
      named: the mesh axes that the loss names.
      cut_along: those along which its attention takes rows to be cut.

    Raises:
      PartsError: the attention takes rows to be cut along an axis that splits the batch by rows; or the loss does not
        name an axis that cuts another dim, and `loss_view` does not say that this is meant.
    """
    wrong = sorted(cut_along & {*options.setup.split_axes} - {*options.cut.other_axes})
    if wrong:
        raise PartsError(
            f"loss_fn: its attention takes each row to be cut over {wrong[0]!r}, which splits the batch by rows: "
            f"give batch_specs=P(..., {wrong[0]!r}), and shard_batch the same specs; or, for complete rows on each "
            "device, give the attention the name of another axis"
        )
    for names, leaf, spec in options.cut.named(batch) if options.loss_view == "auto" else ():
        for dim, entry in enumerate(spec[1:], 1):
            missing = sorted({axis for axis in axes_in(entry) if options.setup.sizes[axis] > 1} - named)
            if missing:
                raise PartsError(
                    f"loss_fn: batch leaf {path_of(names)} of shape {np.shape(leaf)} is cut along dim {dim} over the "
                    f"mesh axes {missing}, which the loss does not name, so each device would take its part for the "
                    "whole. Name them where parts meet, as in jaxshard.tensor.ring_attention(q, k, v, "
                    f"axis={missing[0]!r}) or jax.lax.psum(x, {missing[0]!r}); or, if the loss is a mean over all that "
                    'is cut, pass loss_view="local"; or leave the axis out of batch_specs'
                )


def check_arguments(args: tuple[Tree, ...], batch: Tree, options: LossOptions) -> None:
    """Checks the further arguments.

    Raises:
      ValueError: in the local view one has as many rows as the batch, and no mark `whole`; or another mesh is set.
      TypeError: one has a leaf that is neither an array nor a number.
    """
    check_context("the loss", options.setup.mesh)
    for i, arg in enumerate(args):
        _check_leaves(i, arg)
    is_split = options.cut.num_row_parts * options.microbatches > 1
    if options.is_meant and is_split and (text := like_rows(args, batch)):
        raise ValueError(text)


def unmarked(args: tuple[Tree, ...]) -> tuple[Tree, ...]:
    """The further arguments, with `Whole` removed."""
    return jax.tree.map(lambda x: x.tree if _is_whole(x) else x, args, is_leaf=_is_whole)


def _check_leaves(position: int, arg: Tree) -> None:
    for names, leaf in named_leaves(arg):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, int | float | complex):
            where = f"{position}: {path_of(names)}" if names else position
            raise TypeError(
                f"further argument {where} is a {type(leaf).__name__}, neither an array nor a number: let the loss "
                "close over it, and pass only a model's arrays, as by equinox.partition(model, equinox.is_array)"
            )


def like_rows(args: tuple[Tree, ...], batch: Tree, parts: int = 1) -> str:
    """Which further argument has as many rows as `parts` times `batch`, and is not marked `whole`; "" if none."""
    num_rows = np.shape(jax.tree.leaves(batch)[0])[0] * parts
    for path, leaf in jax.tree_util.tree_flatten_with_path(args, is_leaf=_is_whole)[0]:
        shape = np.shape(leaf) if not _is_whole(leaf) else ()
        if shape[:1] != (num_rows,) or (len(shape) == 1 and is_like_raw_key(leaf)):
            continue
        position, *rest = (jax.tree_util.keystr((key,), simple=True) for key in path)
        return (
            f"further argument {position}{': ' + '/'.join(rest) if rest else ''} has shape {shape}, and the batch has "
            f"{num_rows} rows: the batch is split over devices, further arguments are not, so its rows would be paired "
            "with the wrong ones. Put it into the batch, such as (x, y); or, if each device needs all of it, pass "
            "jaxshard.whole(y)"
        )
    return ""


def _is_whole(x: object) -> bool:
    return isinstance(x, Whole)


def folded(args: tuple[Tree, ...], roles: Sequence[str], by: jax.Array | int) -> tuple[Tree, ...]:
    """The further arguments, with the number `by` folded into their keys, as `roles` has them."""

    def fold(x: Tree, role: str) -> Tree:
        if role == "other":
            return x
        keys = x if role == "key" else jax.random.wrap_key_data(x)
        new = jax.vmap(lambda key: jax.random.fold_in(key, by))(keys.reshape(-1)).reshape(keys.shape)
        return new if role == "key" else jax.random.key_data(new)

    leaves, treedef = jax.tree.flatten(args)
    return jax.tree.unflatten(treedef, [fold(x, role) for x, role in zip(leaves, roles, strict=True)])


def check_global(batch: Tree, mesh: AnyMesh) -> None:
    """Raises a ValueError if, on a mesh of several processes, a leaf has only this process's rows.

    JAX would take them for the whole batch, and mix the processes' rows silently.
    """
    for names, leaf in named_leaves(batch) if len(processes_of(mesh)) > 1 else ():
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            raise ValueError(
                f"batch: {path_of(names)} has only this process's rows; make global arrays with "
                "jaxshard.shard_batch(batch, opt)"
            )
