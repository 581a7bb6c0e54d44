"""`train_step`: loss, gradients, optimizer and new params in one compiled, donating step."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Never, Self

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.base.tree import check_alive, is_staged, is_traced, named_leaves, path_of, shape_of, shapes_of
from jaxshard.base.types import Metrics, Params, State, Tree
from jaxshard.collectives import global_view
from jaxshard.layout.layout import Layout
from jaxshard.loss.arguments import LossOptions, View, check_arguments, check_batch, check_global, check_options
from jaxshard.loss.gradients import LossFn, LossFunction
from jaxshard.mesh import check_has_devices
from jaxshard.optimizer.inner.update import fast
from jaxshard.optimizer.optimizer import ShardedOptimizer, described, setup_of
from jaxshard.optimizer.sharding import Setup
from jaxshard.optimizer.state import check_state, in_order, within_reach
from jaxshard.optimizer.update import advance
from jaxshard.platforms import compiler_options as compilers
from jaxshard.platforms.platform import Value
from jaxshard.step.program import (
    KeyWatch,
    Program,
    Returned,
    check_not_donated,
    check_processes,
    collector_at_rest,
    donated_arguments,
    placed,
    placed_leaf,
    run,
)
from jaxshard.step.skips import Names, Verdicts, check_may_be_skipped, judged, rescaled
from jaxshard.system.interrupts import Interrupts
from jaxshard.system.text import checks_names, html_table, without_names

ENDS_TRAIL = True  # for `programs.source`: users' functions run inside ours

ExtraFn = Callable[[Tree, Tree], dict[str, Tree]]


@checks_names
def train_step(
    loss_fn: LossFn,
    opt: ShardedOptimizer,
    *,
    has_aux: bool = False,
    microbatches: int = 1,
    weighted: bool = False,
    fold_keys: bool = True,
    loss_view: View = "auto",
    batch_specs: Tree = None,
    donate: bool | None = None,
    extra: ExtraFn | None = None,
    max_skips: int | None = 20,
    compiler_options: Mapping[str, Value] | None = None,
) -> "TrainStep":
    """A complete training step, compiled once: `step(params, state, batch, *args) -> (params, state, metrics)`.

    Args:
      loss_fn, opt, has_aux, microbatches, weighted, fold_keys, loss_view, batch_specs: as for `value_and_grad`.
      donate: the step reuses the memory of params and state that already have `opt.shardings`; these arrays are
        deleted. Arrays elsewhere (NumPy, one device) are copied, and remain valid. None: yes, but not on CPU devices
        of a single process, where JAX crashes the process if a donated array is used in another `jit`.
      extra: `(params, batch) -> dict` of further arguments for the optimizer's `update`, which also gets `value` (the
        loss) and `grad`, if it accepts them.
      max_skips: the number of skipped steps in a row that are allowed. A step is skipped if its loss or a gradient is
        not finite, or if params or state would no longer be (for this, state on the host is read once more): it changes
        nothing on any device, and the second call after it warns (at the end, `step.close()` does, or the end of the
        program). After more than `max_skips` in a row, the second call after that raises `NonFiniteError`. None: such
        steps go to the optimizer, as `apply_if_finite` and `skip_not_finite` need, which count them themselves.
      compiler_options: XLA options by name, in addition to those that jaxshard sets (docs/compiler_options.md lists
        these with their reasons), or to override some: `{"xla_gpu_enable_while_loop_double_buffering": False}`.

    Returns:
      The step. Its metrics are replicated scalars: "loss"; "grad_norm", of the full averaged gradient; "skipped",
      whether params and state stayed as they were, bit for bit; "bad_leaf", the index (in
      `jax.tree.leaves((params, state))`, without frozen params) of the first leaf whose gradient or new value is not
      finite, or -1; "loss_scale", the scale of this step, if the optimizer has one; and with `has_aux` "aux", as
      `value_and_grad` returns it. With `weighted`, a batch of weight 0 is skipped too.
      `step.lower(...)` is `jax.jit`'s, also for `ShapeDtypeStruct`s; `step.layout(...)` says where everything lives.

    Raises:
      NonFiniteError: see `max_skips`. That call dispatched nothing, so params and state remain valid. Overflows that
        only lower the loss scale do not count.
      TypeError: `opt` is not a `ShardedOptimizer`.
      ValueError: the compiler does not know an option (at the first step); arrays were donated to an earlier step; a
        further argument is an array of params or state, and so donated; the batch's rows do not divide, or (several
        processes) the batch does not consist of global arrays.
    """
    setup = setup_of(opt, "train_step", loss_fn)
    if max_skips is not None and (type(max_skips) is not int or max_skips < 0):
        raise ValueError(f"train_step: max_skips {max_skips!r} must be an integer, 0 or more, or None")
    if max_skips is None and setup.config.loss_scale is not None:
        raise ValueError(
            "train_step: loss scaling skips steps that overflow, but max_skips=None forbids skipping; leave one out"
        )
    options = LossOptions(loss_fn, setup, has_aux, microbatches, weighted, fold_keys, loss_view=loss_view)
    options = dataclasses.replace(options, donate=donate, batch_specs=batch_specs)
    check_options("train_step", options)
    given = compilers.check_given("train_step", compiler_options)
    return TrainStep(LossFunction(options), extra, max_skips, given)


class TrainStep:
    """The result of `train_step`; it compiles one program for each structure, shapes and dtypes of params and state.

    `with train_step(...) as step:` closes it at the end.
    """

    def __init__(self, loss: LossFunction, extra: ExtraFn | None, max_skips: int | None, given: dict[str, Value]):
        self._loss, self._setup, self._given = loss, loss.setup, given
        self.donate, self._extra, self._max_skips = loss.options.donates, extra, max_skips
        self._programs: dict[tuple[Hashable, ...], Program] = {}
        self._agreed: list[Program] = []
        self._returned, self._keys, self._interrupts = Returned(), KeyWatch(), Interrupts()
        self._verdicts = Verdicts(max_skips, self._setup.config.loss_scale)
        self._transformed = jax.jit(self._step, compiler_options=self.compiler_options)  # as in `LossFunction`

    def __repr__(self) -> str:
        return "\n".join(f"{name:<12}  {value}" for name, value in self._facts())

    def _repr_html_(self) -> str:
        return html_table(self._facts())

    def _facts(self) -> list[tuple[str, str]]:
        facts = self._loss.options.facts
        mine = {"donate": self.donate, "max_skips": self._max_skips, "programs": len(self._programs)}
        facts = {"train_step": facts.pop("loss"), "optimizer": described(self._setup), **facts, **mine}
        return [(name, str(value)) for name, value in facts.items()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            self.close()
        else:
            self._interrupts.release()

    def close(self) -> None:
        """Waits for the last step, and warns if it was skipped; otherwise the end of the program does.

        Raises:
          NonFiniteError: too many steps in a row were skipped, the last one among them.
        """
        self._interrupts.release()
        self._verdicts.tell()

    @property
    def compiler_options(self) -> dict[str, Value]:
        """The XLA options that it is compiled with: jaxshard's, and the user's."""
        return self._loss.compiler_options | self._given

    def __call__(
        self, params: Params, state: State, batch: Tree, *args: Tree, **named: Never
    ) -> tuple[Params, State, Metrics]:
        if named:  # no decorator checks it: `Interrupts` needs the user's own frame above this one
            raise without_names("TrainStep", next(iter(named)), "params, state, batch, *args")
        known: Program | None = self._returned.program_for(params, state)
        if known is None:
            state = in_order(self._setup, params=params, state=state, batch=batch)
        check_batch(batch, self._loss.options)
        program = known or self._program(params, state)
        check_arguments(args, batch, self._loss.options)
        unknown = {"params": params, "state": state} if known is None else {}
        if is_traced(unknown, batch, args):
            return (self._step if is_staged() else self._transformed)(params, state, batch, *args)
        check_has_devices("train_step", self._setup.mesh)
        for what, tree in {**unknown, "batch": batch, "argument": args}.items():
            check_alive(f"train_step: {what}", tree)
        check_global(batch, self._setup.mesh)
        self._verdicts.tell(params, but=1)
        if known is None:
            params, state = self._placed(program, params, state)
        given, batch = batch, jax.tree.map(placed_leaf, batch, self._loss.options.cut.shardings(batch))
        args = within_reach(self._setup, args)
        if self.donate:
            check_not_donated(args, {"params": params, "state": state})
        if jax.process_count() > 1 and program not in self._agreed:
            check_processes(program, params, state, batch, args)
            self._agreed.append(program)
        if not self._loss.options.is_meant:
            self._keys.look(given, args, lambda: program.draws_from(params, state, batch, args))
        self._interrupts.begin((params, state) if self.donate else ())
        try:
            results = run(program.run, params, state, batch, args)
        except BaseException as error:
            self._interrupts.cancel(error)
            raise
        if is_traced(results[2]):  # a trace around this call has closed over all its arrays
            self._interrupts.cancel()
            return results
        self._verdicts.expect(program.names, results[2])
        self._returned.note(program, *results[:2])
        self._interrupts.end()
        return results

    def lower(self, params: Tree, state: Tree, batch: Tree, *args: Tree) -> jax.stages.Lowered:
        """The lowered step, like a jitted function's `lower`; takes arrays or their shapes, runs nothing."""
        return self.trace(params, state, batch, *args).lower()

    def trace(self, params: Tree, state: Tree, batch: Tree, *args: Tree) -> jax.stages.Traced:
        """The traced step, like a jitted function's `trace`; takes arrays or their shapes, also on an abstract mesh."""
        state = in_order(self._setup, params=params, state=state, batch=batch)
        check_batch(batch, self._loss.options)
        program = self._program(params, state)
        check_arguments(args, batch, self._loss.options)
        params, state = jax.tree.map(shape_of, (params, state), (program.params, program.state))
        batch = jax.tree.map(shape_of, batch, self._loss.options.cut.shardings(batch))
        return program.run.trace(params, state, batch, *args)

    def layout(self, params: Tree, batch: Tree, *args: Tree) -> Layout:
        """Where every leaf lives, and where and why each parameter is gathered; compiles nothing."""
        return self._loss.layout(params, batch, *args)

    def _placed(self, program: "Program", params: Params, state: State) -> tuple[Params, State]:
        """Params and state under the program's shardings; remembers which arrays became which."""
        found = placed(program, params, state)
        self._returned.found(program, (params, state), found)
        return found

    def _program(self, params: Tree, state: Tree) -> "Program":
        leaves, treedef = jax.tree.flatten((params, state))
        key = (treedef, *((getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves))
        if key not in self._programs:
            self._programs[key] = self._build(params, state)
        return self._programs[key]

    @collector_at_rest()
    def _build(self, params: Tree, state: Tree) -> "Program":
        setup = self._setup
        setup.strictly(params)
        check_state("train_step", setup, state, params)
        shapes, wanted = shapes_of(state), setup.param_shardings(params)
        settled = setup.settled(params, shapes)
        if self._max_skips is not None or self._loss.options.weighted:
            check_may_be_skipped(settled.binding)
        compilers.check_known("train_step", setup.mesh, self._given)
        before, after = (setup.state_shardings(setup.with_state(params, tree)) for tree in (shapes, settled.state))
        trees = (setup.trained(params), settled.state)
        run = jax.jit(
            self._step,
            out_shardings=(wanted, after, NamedSharding(setup.mesh, P())),
            donate_argnums=donated_arguments(shapes, settled.state) if self.donate else (),
            compiler_options=self.compiler_options,
        )
        of_params, of_state = ([path_of(names) for names, _ in named_leaves(tree)] for tree in trees)
        return Program(run, wanted, before, setup.mesh, Names(of_params, of_state))

    @collector_at_rest()
    def _step(self, params: Tree, state: Tree, batch: Tree, *args: Tree) -> tuple[Tree, Tree, Metrics]:
        setup, scaling = self._setup, self._setup.config.loss_scale
        scale = None if scaling is None else state.extra["loss_scale"]["scale"]
        found = self._loss.measure(params, batch, args, scale=scale)
        if self._max_skips is not None:
            # The norm, the verdict and the update read the means: without a barrier XLA would keep the sums, too.
            found = found._replace(grads=jax.tree.map(jax.lax.optimization_barrier, found.grads))
        judge = global_view.globally(judged, setup.mesh, (P(), P(), P()))
        norm, bad_leaf, finite = judge(found.loss, fast(found.grads))
        ok = found.weight != 0 if self._loss.options.weighted else None
        if self._max_skips is not None:
            ok = finite if ok is None else ok & finite
        asked = self._extra(params, batch) if self._extra else {}
        offered = {"value": found.loss, "grad": fast(found.grads)} | asked
        judges, old = self._max_skips is not None, setup.trained(params)
        trained, after, agreed = advance(setup, found.grads, state, old, offered, want="params", ok=ok, judges=judges)
        if agreed is not None:
            ok, bad_leaf = agreed.ok, jnp.where(bad_leaf < 0, agreed.bad_leaf, bad_leaf)
        params = setup.with_frozen(trained, params, lambda x: x)
        skipped = jnp.bool_(False) if ok is None else ~ok
        metrics = Metrics(loss=found.loss, grad_norm=norm, skipped=skipped, bad_leaf=bad_leaf)
        if scaling is not None and scale is not None:
            metrics["loss_scale"] = scale
            weight = found.weight if self._loss.options.weighted else None
            after = rescaled(scaling, state, after, skipped, finite, weight)
        if self._loss.options.has_aux:
            metrics["aux"] = found.aux
        return params, after, metrics


def loss_of(step: TrainStep) -> LossFunction:
    """The loss of a step, with its options and setup."""
    return step._loss


def with_setup(step: TrainStep, setup: Setup, microbatches: int | None = None) -> TrainStep:
    """The same step under another strategy or mesh; None: with as many microbatches."""
    options = step._loss.options
    options = dataclasses.replace(options, setup=setup, microbatches=microbatches or options.microbatches)
    return TrainStep(LossFunction(options), step._extra, step._max_skips, step._given)
