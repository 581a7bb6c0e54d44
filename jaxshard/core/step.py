"""`train_step`: loss, gradients, optimizer and new params in one compiled, donating step."""

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.base.tree import check_alive, is_traced, matched, named_leaves, path_of, shape_of, sum_dtype
from jaxshard.core import collectives
from jaxshard.core.gradients import LossFunction, check_batch, check_global, value_and_grad
from jaxshard.core.layout import Layout
from jaxshard.core.optimizer import ShardedOptimizer, engine_of
from jaxshard.core.precision import LossScale
from jaxshard.digest import digests
from jaxshard.inner.update import Settled, fast
from jaxshard.mesh import check_has_devices
from jaxshard.processes import agreement


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
    max_skips: int | None = 20,
) -> "TrainStep":
    """A whole training step, compiled once: `step(params, state, batch, *args) -> (params, state, metrics)`.

    Args:
      loss_fn, opt, has_aux, microbatches, weighted, fold_keys: as for `value_and_grad`.
      donate: reuse the memory of params and state that lie where they should; they are gone afterwards. Arrays that
        lie elsewhere (NumPy, one device) are copied, and stay.
      extra: `(params, batch) -> dict` of further arguments for the optimizer's `update`, which also gets `value` (the
        loss) and `grad`, if it takes them.
      max_skips: a step whose loss or gradient is not finite changes nothing, on any device, and warns; after more
        than so many in a row, the next call but one raises. None: whatever comes goes to the optimizer, as
        `apply_if_finite` and `skip_not_finite` need, to count such steps themselves.

    Returns:
      The step. metrics are replicated scalars: "loss"; "grad_norm", of the whole averaged gradient; "skipped", whether
      params and state stayed as they were, bit for bit; "bad_leaf", the index (in `jax.tree.leaves(params)`) of the
      first gradient that is not finite, or -1; "loss_scale", the one used, if the optimizer has one; and "aux" with
      `has_aux`. With `weighted`, a batch of weight 0 is skipped too. `step.lower(...)` is `jax.jit`'s, also for
      `ShapeDtypeStruct`s; `step.layout(...)` says where everything lives.

    Raises:
      NonFiniteError: see `max_skips`; nothing was dispatched, so params and state are still there. Overflows that only
        lower the loss scale do not count.
      TypeError: `opt` is not a `ShardedOptimizer`.
      ValueError: arrays that an earlier step took, a batch that does not divide, or (several processes) one that is
        not made of global arrays.
    """
    engine_of(opt, "train_step")
    if max_skips is not None and (type(max_skips) is not int or max_skips < 0):
        raise ValueError(f"train_step: max_skips {max_skips!r} must be a whole number, 0 or more, or None")
    if max_skips is None and opt.config.loss_scale is not None:
        raise ValueError("train_step: loss scaling skips the steps that overflow; max_skips=None forbids it, drop one")
    loss = value_and_grad(
        loss_fn, opt, has_aux=has_aux, microbatches=microbatches, weighted=weighted, fold_keys=fold_keys
    )
    return TrainStep(loss, donate, extra, max_skips)


_LOSS = "the loss"


def _what(leaf: str) -> str:
    return leaf if leaf == _LOSS else f"the gradient of {leaf}"


class NonFiniteError(FloatingPointError):
    """Too many steps in a row had a loss or gradient that is not finite.

    `step` is the last one's number, counted from 1 for the first call of that `train_step`; `leaf` is the path of the
    first bad gradient ("the loss", if that alone was bad), and `what` names it in words.
    """

    def __init__(self, step: int, leaf: str, count: int):
        self.step, self.leaf, self.what = step, leaf, _what(leaf)
        super().__init__(
            f"train_step: call {step}: {self.what} is not finite, the {count}. time in a row. Params and state "
            "are as the last good step left them: lower the learning rate, look at the batch, or allow more (max_skips)"
        )


@dataclasses.dataclass(eq=False)
class TrainStep:
    """What `train_step` returns; one program for each structure and shape of params."""

    loss: LossFunction
    donate: bool
    extra: Callable[[Any, Any], dict[str, Any]] | None
    max_skips: int | None
    _programs: dict[Any, "_Program"] = dataclasses.field(default_factory=dict, repr=False)
    _agreed: list["_Program"] = dataclasses.field(default_factory=list, repr=False)
    _verdicts: "_Verdicts" = dataclasses.field(default_factory=lambda: _Verdicts(), repr=False)

    def __call__(self, params: Any, state: Any, batch: Any, *args: Any) -> tuple[Any, Any, dict[str, Any]]:
        state = self._arrays(state, params)
        program = self._program(params, state, batch)
        if is_traced(params, state, batch, args):
            return self._step(params, state, batch, *args)
        check_has_devices("train_step", self.loss.options.engine.mesh)
        for what, tree in (("params", params), ("state", state), ("batch", batch), ("argument", args)):
            check_alive(f"train_step: {what}", tree)
        check_global(batch)
        self._verdicts.check(self.max_skips, self.loss.options.engine.config.loss_scale)
        agreement.check_same_arrays("train_step", {"params": params, "state": state})
        params, state = _placed((params, state), (program.params, program.state))
        batch = jax.tree.map(lambda x: _placed_leaf(x, program.batch), batch)
        args = self.loss.options.engine.within_reach(args)
        if jax.process_count() > 1 and program not in self._agreed:
            _check_processes(program, params, state, batch, args)
            self._agreed.append(program)
        results = program.run(params, state, batch, *args)
        self._verdicts.expect(program.names, results[2])
        return results

    def lower(self, params: Any, state: Any, batch: Any, *args: Any) -> jax.stages.Lowered:
        """The lowered step, as `jax.jit(...).lower`; takes arrays or `ShapeDtypeStruct`s."""
        return self.trace(params, state, batch, *args).lower()

    def trace(self, params: Any, state: Any, batch: Any, *args: Any) -> jax.stages.Traced:
        """The traced step, as `jax.jit(...).trace`; takes arrays or `ShapeDtypeStruct`s, and an abstract mesh too."""
        state = self._arrays(state, params)
        program = self._program(params, state, batch)
        params, state = jax.tree.map(shape_of, (params, state), (program.params, program.state))
        batch = jax.tree.map(lambda x: shape_of(x, program.batch), batch)
        return program.run.trace(params, state, batch, *args)

    def layout(self, params: Any, batch: Any, *args: Any) -> Layout:
        """Where every leaf lives and is gathered, and why; compiles nothing."""
        return self.loss.layout(params, batch, *args)

    def _arrays(self, state: Any, params: Any) -> Any:
        """Python's numbers in a state (a hyperparameter that the user has set) as arrays of the dtype that is due."""
        if all(hasattr(leaf, "shape") for leaf in jax.tree.leaves(state)):
            return state
        expected = self.loss.options.engine.expected_state(state, params)
        return matched(lambda x, want: x if hasattr(x, "shape") else jnp.asarray(x, want.dtype), state, expected)

    def _program(self, params: Any, state: Any, batch: Any) -> "_Program":
        leaves, treedef = jax.tree.flatten((params, state))
        key = (treedef, *((getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves))
        check_batch(batch, self.loss.options)
        if key not in self._programs:
            self._programs[key] = self._build(params, state)
        return self._programs[key]

    def _build(self, params: Any, state: Any) -> "_Program":
        engine = self.loss.options.engine
        settled, wanted = engine.settled(params), engine.shardings(params)
        self._check_state(state, engine.expected_state(state, params), settled)
        before, after = (engine.state_shardings(params, tree) for tree in (state, settled.state))
        batch = NamedSharding(engine.mesh, P(engine.batch_axes))
        run = jax.jit(
            self._step,
            out_shardings=(wanted.params, after, NamedSharding(engine.mesh, P())),
            donate_argnums=(0, 1) if self.donate else (),
            compiler_options=self.loss.options.compiler_options,
        )
        names = [path_of(names) for names, _ in named_leaves(params)]
        return _Program(run, wanted.params, before, batch, names)

    def _check_state(self, state: Any, expected: Any, settled: Settled) -> None:
        structure = jax.tree.structure(state)
        self.loss.options.engine.check_state("train_step", state, expected)
        if structure != jax.tree.structure(expected):
            raise ValueError(
                "train_step: the state has another structure than opt.init(params) makes; was it made by another "
                f"optimizer? Got {structure}, expected {jax.tree.structure(expected)}"
            )
        if settled.binding and self.max_skips is not None and structure != jax.tree.structure(settled.state):
            raise ValueError(
                f"train_step: the first update makes or drops {path_of(settled.binding[0])} in the state, so that it "
                "could not be skipped: make this leaf in the optimizer's init, or skip nothing (max_skips=None)"
            )

    def _step(self, params: Any, state: Any, batch: Any, *args: Any) -> tuple[Any, Any, dict[str, Any]]:
        engine, scaling = self.loss.options.engine, self.loss.options.engine.config.loss_scale
        scale = None if scaling is None else state.extra["loss_scale"]["scale"]
        found = self.loss.measure(params, batch, args, scale=scale)
        norm, bad_leaf, finite = engine.globally(_judged, (P(), P(), P()))(found.loss, fast(found.grads))
        ok = found.weight != 0 if self.loss.options.weighted else None
        if self.max_skips is not None:
            ok = finite if ok is None else ok & finite
        asked = self.extra(params, batch) if self.extra else {}
        offered = {"value": found.loss, "grad": fast(found.grads)}
        params, after = engine.advance(found.grads, state, params, offered | asked, want="params", ok=ok)
        skipped = jnp.bool_(False) if ok is None else ~ok
        metrics = {"loss": found.loss, "grad_norm": norm, "skipped": skipped, "bad_leaf": bad_leaf}
        if scaling is not None:
            metrics["loss_scale"] = scale
            old = state.extra["loss_scale"]
            new = scaling.after(old, ~finite)
            if self.loss.options.weighted:  # a batch that weighs nothing says nothing of the scale
                new = jax.tree.map(lambda n, o: jnp.where(found.weight == 0, o, n), new, old)
            after = after._replace(extra=after.extra | {"loss_scale": new})
        return params, after, metrics | ({"aux": found.aux} if self.loss.options.has_aux else {})


def _judged(loss: jax.Array, grads: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(norm of the whole gradient, index of its first leaf that is not finite or -1, whether all is finite).

    A gradient so large that its square overflows is not finite either: it would stay in second moments for ever.
    """
    squares = [_sum_of_squares(g) for g in jax.tree.leaves(grads)]
    if not squares:
        return jnp.zeros(()), jnp.int32(-1), jnp.isfinite(loss)
    bad = ~jnp.isfinite(jnp.stack([x.astype(jnp.result_type(*squares)) for x in squares]))
    first = jnp.where(bad.any(), jnp.argmax(bad).astype(jnp.int32), -1)
    return jnp.sqrt(sum(squares)), first, jnp.isfinite(loss) & ~bad.any()


def _sum_of_squares(x: jax.Array) -> jax.Array:
    """In float32 at least: in bf16 a sum of many squares would stop growing."""
    x = x.astype(sum_dtype(x))
    return jnp.sum(jnp.square(x.real) + jnp.square(x.imag) if jnp.iscomplexobj(x) else jnp.square(x))


class _Verdicts:
    """What became of the steps: looked at one call late, so that the devices never wait for the host.

    Always exactly so late, so that several processes raise at the same call.
    """

    def __init__(self):
        self._calls, self._bad_in_a_row = 0, 0
        self._pending: list[tuple[int, list[str], dict[str, Any]]] = []

    def expect(self, names: list[str], metrics: dict[str, Any]) -> None:
        self._calls += 1
        kept = {name: metrics[name] for name in ("skipped", "bad_leaf", "loss", "loss_scale") if name in metrics}
        self._pending.append((self._calls, names, kept))

    def check(self, max_skips: int | None, scaling: LossScale | None) -> None:
        """Warns of what was skipped, or raises."""
        while len(self._pending) > 1:
            call, names, metrics = self._pending.pop(0)
            if bool(metrics["skipped"]):
                self._skipped(call, names, metrics, max_skips, scaling)
            else:
                self._bad_in_a_row = 0

    def _skipped(self, call: int, names: list[str], metrics: Any, max_skips: int | None, scaling: Any) -> None:
        bad = int(metrics["bad_leaf"])
        if bad < 0 and math.isfinite(float(metrics["loss"])):
            self._warn(call, "the whole batch has weight 0")
            return
        if scaling is not None and float(metrics["loss_scale"]) > scaling.minimum:
            return  # an overflow, which the scale will answer
        self._bad_in_a_row += 1
        leaf = _LOSS if bad < 0 else names[bad]
        if max_skips is not None and self._bad_in_a_row > max_skips:
            count, self._bad_in_a_row = self._bad_in_a_row, 0
            self._pending.clear()  # the step after that one had the same params
            raise NonFiniteError(call, leaf, count)
        self._warn(call, f"{_what(leaf)} is not finite")

    def _warn(self, call: int, why: str) -> None:
        warnings.warn(f"train_step: call {call} changed nothing: {why}", stacklevel=5)


def _check_processes(program: "_Program", params: Any, state: Any, batch: Any, args: Any) -> None:
    """Before the first step: whether all processes run the same program, from the same params and state.

    Raises:
      ProcessError: something in the program differs (a learning rate, a shape).
      ReplicaError: a leaf differs.
    """
    text = program.run.lower(params, state, batch, *args).as_text()
    cure = "give the same code, options and numbers (learning rate) to all processes"
    agreement.check_same("train_step: the step's program", text, cure)
    digests({"params": params, "state": state, "batch": batch})


@dataclasses.dataclass(frozen=True, eq=False)
class _Program:
    run: Any
    params: Any
    state: Any
    batch: NamedSharding
    names: list[str]


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
