"""`train_step`: loss, gradients, optimizer and new params in one compiled, donating step."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard import collectives
from jaxshard.engine import abstract_at
from jaxshard.gradients import LossFunction, check_batch, check_global, value_and_grad
from jaxshard.layout import Layout
from jaxshard.optimizer import ShardedOptimizer, engine_of
from jaxshard.tree import check_alive, check_same_structure, is_traced


def train_step(
    loss_fn: Callable[..., Any],
    opt: ShardedOptimizer,
    *,
    has_aux: bool = False,
    microbatches: int = 1,
    weighted: bool = False,
    fold_keys: bool = True,
    donate: bool = True,
    extra: Callable[[Any, Any], dict[str, Any]] | None = None,
) -> "TrainStep":
    """A whole training step, compiled once: `step(params, state, batch, *args) -> (params, state, metrics)`.

    Args:
      loss_fn, opt, has_aux, microbatches, weighted, fold_keys: as for `value_and_grad`.
      donate: reuse the memory of params and state that lie where they should; they are gone afterwards. Arrays that
        lie elsewhere (NumPy, one device) are copied, and stay.
      extra: `(params, batch) -> dict` of further arguments for the optimizer's `update`, which also gets `value` (the
        loss) and `grad`.

    Returns:
      The step. metrics has "loss" and "grad_norm" (the norm of the whole averaged gradient), both replicated scalars,
      and "aux" with `has_aux`. `step.lower(...)` is `jax.jit`'s, also for `ShapeDtypeStruct`s; `step.layout(...)` says
      where everything lives.

    Raises:
      TypeError: `opt` is not a `ShardedOptimizer`.
      ValueError: arrays that an earlier step took, a batch that does not divide, or (several processes) one that is
        not made of global arrays.
    """
    engine_of(opt, "train_step")
    loss = value_and_grad(
        loss_fn, opt, has_aux=has_aux, microbatches=microbatches, weighted=weighted, fold_keys=fold_keys
    )
    return TrainStep(loss, donate, extra)


@dataclasses.dataclass(eq=False)
class TrainStep:
    """What `train_step` returns; one program for each structure and shape of params."""

    loss: LossFunction
    donate: bool
    extra: Callable[[Any, Any], dict[str, Any]] | None
    _programs: dict[Any, "_Program"] = dataclasses.field(default_factory=dict, repr=False)

    def __call__(self, params: Any, state: Any, batch: Any, *args: Any) -> tuple[Any, Any, dict[str, Any]]:
        program = self._program(params, state, batch)
        if is_traced(params, state, batch, args):
            return self._step(params, state, batch, *args)
        for what, tree in (("params", params), ("state", state), ("batch", batch), ("argument", args)):
            check_alive(f"train_step: {what}", tree)
        check_global(batch)
        params, state = _placed((params, state), (program.params, program.state))
        batch = jax.tree.map(lambda x: _placed_leaf(x, program.batch), batch)
        return program.run(params, state, batch, *self.loss.options.engine.within_reach(args))

    def lower(self, params: Any, state: Any, batch: Any, *args: Any) -> jax.stages.Lowered:
        """The lowered step, as `jax.jit(...).lower`; takes arrays or `ShapeDtypeStruct`s."""
        program = self._program(params, state, batch)
        params, state = jax.tree.map(abstract_at, (params, state), (program.params, program.state))
        batch = jax.tree.map(lambda x: abstract_at(x, program.batch), batch)
        return program.run.lower(params, state, batch, *args)

    def layout(self, params: Any, batch: Any, *args: Any) -> Layout:
        """Where every leaf lives and is gathered, and why; compiles nothing."""
        return self.loss.layout(params, batch, *args)

    def _program(self, params: Any, state: Any, batch: Any) -> "_Program":
        leaves, treedef = jax.tree.flatten((params, state))
        key = (treedef, *((getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves))
        check_batch(batch, self.loss.options)
        if key not in self._programs:
            self._programs[key] = self._build(params, state)
        return self._programs[key]

    def _build(self, params: Any, state: Any) -> "_Program":
        engine = self.loss.options.engine
        wanted = engine.shardings(params)
        expected = engine.abstract_state(params)
        check_same_structure("train_step: the state", state, expected, "part of opt.init(params)")
        if jax.tree.structure(state) != jax.tree.structure(expected):
            raise ValueError(
                "train_step: the state has another structure than opt.init(params) makes; was it made by another "
                f"optimizer? Got {jax.tree.structure(state)}, expected {jax.tree.structure(expected)}"
            )
        batch = NamedSharding(engine.mesh, P(engine.batch_axes))
        run = jax.jit(
            self._step,
            out_shardings=(wanted.params, wanted.state, NamedSharding(engine.mesh, P())),
            donate_argnums=(0, 1) if self.donate else (),
        )
        return _Program(run, wanted.params, wanted.state, batch)

    def _step(self, params: Any, state: Any, batch: Any, *args: Any) -> tuple[Any, Any, dict[str, Any]]:
        engine = self.loss.options.engine
        value, grads = self.loss(params, batch, *args)
        loss, aux = value if self.loss.options.has_aux else (value, None)
        norm = engine.globally(optax.tree.norm, P())(grads)
        further = {"value": loss, "grad": grads} | (self.extra(params, batch) if self.extra else {})
        params, state = engine.advance(grads, state, params, further, want="params")
        metrics = {"loss": loss, "grad_norm": norm}
        return params, state, metrics | ({"aux": aux} if self.loss.options.has_aux else {})


@dataclasses.dataclass(frozen=True)
class _Program:
    run: Any
    params: Any
    state: Any
    batch: NamedSharding


def _placed(tree: Any, shardings: Any) -> Any:
    """The tree where it must lie; an array that is two leaves is copied, for it cannot be donated twice."""
    taken: set[int] = set()

    def place(x: Any, sharding: NamedSharding) -> Any:
        placed = _placed_leaf(x, sharding)
        if id(placed) in taken:
            placed = collectives.copied(placed)
        taken.add(id(placed))
        return placed

    return jax.tree.map(place, tree, shardings)


def _placed_leaf(x: Any, sharding: NamedSharding) -> Any:
    """`x` itself where it lies right, else a copy: so that only what we may take is donated."""
    return x if isinstance(x, jax.Array) and x.sharding == sharding else collectives.copy_to(x, sharding)
