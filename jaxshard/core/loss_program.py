"""The loss function as a traced program, checked before anything runs."""

import dataclasses
import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxshard.base.jaxprs import depends
from jaxshard.base.tree import is_key, named_leaves, path_of, sum_dtype
from jaxshard.base.types import Jaxpr, Tree, TreeDef
from jaxshard.core import unshard
from jaxshard.core.sharding import Setup
from jaxshard.core.unshard import Scale, Value
from jaxshard.mesh import platform_of


@dataclasses.dataclass(frozen=True)
class LossOptions:
    """A loss function, the optimizer's setup, and the options of `value_and_grad`."""

    loss_fn: Callable[..., Tree]
    setup: Setup
    has_aux: bool
    microbatches: int
    weighted: bool
    fold_keys: bool
    differentiate: bool

    @property
    def checked(self) -> bool:
        """Whether `shard_map` checks types: only if an axis other than the batch axes and `auto_axes` is larger than 1.

        Over the batch axes our own code makes every sum, so it needs no check.
        """
        ours = (*self.setup.batch_axes, *self.setup.config.auto_axes)
        return any(size > 1 for axis, size in self.setup.sizes.items() if axis not in ours)

    @property
    def compiler_options(self) -> dict[str, str] | None:
        """Options for `jax.jit`, which keep simulated devices from deadlocks.

        XLA for CPU (jax 0.10.2, 0.12) schedules for the most concurrency. If loops hold collectives over several axes,
        each device then starts these beside others in its own order, and now and then the devices wait for each other
        forever. Scheduled for the least memory, thousands of runs finished.
        """
        on_cpu = platform_of(self.setup.mesh) == "cpu"
        return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"} if on_cpu and self.checked else None


@dataclasses.dataclass(frozen=True)
class Program:
    """The traced loss: its flat inputs are (params, batch, args, scale), its flat outputs (loss, weight, aux)."""

    jaxpr: Jaxpr
    out_tree: TreeDef

    @classmethod
    def trace(
        cls,
        options: LossOptions,
        treedef: TreeDef,
        whole: Sequence[Tree],
        batch: Tree,
        args: tuple[Tree, ...],
        scale: Scale,
    ) -> "Program":
        """Traces the loss of whole params (a list of shapes), a microbatch and further arguments.

        Raises:
          TypeError: `loss_fn` returns another form than the options say, or values that cannot be averaged.
        """

        def flat(leaves, batch, args, scale):
            with unshard.scaled_by(scale):
                return _normal_form(options.loss_fn(jax.tree.unflatten(treedef, leaves), batch, *args), options)

        try:
            jaxpr, shapes = jax.make_jaxpr(flat, return_shape=True)(whole, batch, args, scale)
        except TypeError as error:
            raise _explained(error, options) from error
        differs = [False] * len(whole) + [True] * len(jax.tree.leaves(batch))
        differs += [options.fold_keys and is_key(x) for x in jax.tree.leaves(args)] + [False] * (scale is not None)
        _check_whole(jaxpr, shapes, options)
        _check_aux(jaxpr, shapes, differs, options)
        return cls(jaxpr, jax.tree.structure(shapes))

    def run(
        self, values: Sequence[Value], batch: Tree, args: tuple[Tree, ...], scale: Scale
    ) -> tuple[Tree, Tree, Tree]:
        """Runs the loss on params that may be `Sharded`; returns (loss, weight, aux)."""
        flat = [*values, *jax.tree.leaves((batch, args, scale))]
        return jax.tree.unflatten(self.out_tree, [jnp.asarray(x) for x in unshard.run(self.jaxpr, flat)])


def _normal_form(out: Tree, options: LossOptions) -> tuple[jax.Array, jax.Array, Tree]:
    """(loss, weight, aux) from whatever form `loss_fn` returns."""
    aux = ()
    if options.has_aux:
        if not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(f"loss_fn: has_aux=True needs (loss, aux), got {type(out).__name__}")
        out, aux = out
    weight = jnp.ones(())
    if options.weighted:
        if not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(f"loss_fn: weighted=True needs (loss_sum, weight), got {type(out).__name__}")
        out, weight = out
        weight = lax.stop_gradient(jnp.asarray(weight, jnp.result_type(float)))
        if weight.shape:
            raise TypeError(f"loss_fn: the weight must be a scalar, got shape {weight.shape}; sum it over the rows")
    if out is None or isinstance(out, tuple | list | dict):
        raise TypeError(f"loss_fn: returned a {type(out).__name__}, not a scalar; set has_aux or weighted")
    loss = jnp.asarray(out)
    if loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(
            f"loss_fn: the loss must be a floating scalar, got {loss.dtype}{list(loss.shape)}; take its mean"
        )
    loss = loss.astype(sum_dtype(loss))  # it is summed over devices, for which bf16 is too narrow
    return loss, weight, jax.tree.map(jnp.asarray, aux)


def _explained(error: TypeError, options: LossOptions) -> TypeError:
    """JAX's error about varying types, with the cure added; any other error unchanged."""
    text = str(error)
    carried = "{V:" in text and any(word in text for word in ("carry", "scan", "while", "branch"))
    if not options.checked or not carried or len(set(re.findall(r"\b([a-z]+\d+\[[\d,]*\])", text))) > 1:
        return error  # ours, or about shapes and dtypes
    return TypeError(
        "loss_fn: with tensor or pipeline axes larger than 1, types are checked, and a value's type changed, most "
        "often a lax.scan or while_loop whose carry starts as a constant. Cast the carry's start to what it becomes: "
        f"jax.lax.pcast(carry, axes, to='varying'), axes being those named below. JAX said: {text}"
    )


def _check_whole(jaxpr: Jaxpr, shapes: Tree, options: LossOptions) -> None:
    """Refuses a loss, weight or aux leaf that differs over a model axis: it was made of shards, and not summed."""
    if not options.checked:
        return
    kinds = ("loss", "weight", "aux leaf")
    for (names, _), out in zip(named_leaves(shapes), jaxpr.out_avals, strict=True):
        if others := sorted(out.manual_axis_type.varying - set(options.setup.batch_axes)):
            what = " ".join((kinds[int(names[0])], *([path_of(names[1:])] if names[1:] else [])))
            raise TypeError(
                f"loss_fn: the {what} differs over {others}: it was made of shards, and not summed. End blocks with "
                "jaxshard.tensor.row_parallel, put a cut sequence together with join_sequence, and sum terms of "
                "parameters (an L2 norm) with jaxshard.tensor.sum_shards, which leaves whole ones alone"
            )


def _check_aux(jaxpr: Jaxpr, shapes: Tree, differs: list[bool], options: LossOptions) -> None:
    """Refuses aux leaves that are not floating and depend on the batch or on folded keys: they cannot be averaged."""
    outs = depends(jaxpr, differs, frozenset(options.setup.batch_axes) if options.microbatches == 1 else None)
    for (names, leaf), varies in zip(named_leaves(shapes), outs, strict=True):
        if names[0] == "2" and varies and not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise TypeError(
                f"loss_fn: aux leaf {path_of(names[1:])} has dtype {leaf.dtype} and depends on the batch, so it "
                "differs between devices and has no average; cast it to a floating dtype, to be averaged"
            )
