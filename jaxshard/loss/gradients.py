"""The boundary of differentiation, and the loss over the whole mesh."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxshard.base.tree import check_alive, is_staged, is_traced
from jaxshard.base.types import AxisTypeError, T, Tree, axes_of, without
from jaxshard.collectives import global_view
from jaxshard.layout.layout import Layout
from jaxshard.loss import advice, arguments, global_loss
from jaxshard.loss.arguments import LossOptions, PartsError, View, check_arguments, check_batch, check_global, like_rows
from jaxshard.loss.loss_report import Price
from jaxshard.loss.params.leaf_plan import before_the_trace
from jaxshard.loss.params.unshard import Scale
from jaxshard.loss.per_device import DeviceLoss, LossPlan
from jaxshard.optimizer.sharding import Setup
from jaxshard.optimizer.state import within_reach
from jaxshard.platforms import compiler_options as compilers
from jaxshard.platforms.platform import StepKind, Value
from jaxshard.system.text import checks_names
from jaxshard.system.users_lines import warn

PART = "the gradients"  # in a step, for `programs.source`

LossFn = Callable[..., Tree]


class LossFunction:
    """A loss over a mesh, with or without its gradients; it is called inside or outside of `jit`.

    Attributes:
      price_of: tells what a loss costs in both views; `jaxshard` sets it, since `plan` stands above this module.
    """

    price_of: ClassVar[Callable[["LossFunction", Tree, Tree, tuple[Tree, ...]], Price | None]] = staticmethod(
        lambda *_: None
    )

    def __init__(self, options: LossOptions):
        self.options = options
        self._is_told = False
        self._jitted = jax.jit(self._traced, compiler_options=self.compiler_options)

    @property
    def setup(self) -> Setup:
        """The setup of the optimizer it was made for."""
        return self.options.setup

    @property
    def compiler_options(self) -> dict[str, Value]:
        """The XLA options that it is compiled with; pass them to your own `jax.jit` around it."""
        cuts = self.setup.config.cuts
        loops = self.options.checked or bool(self.options.cut.other_axes)  # loops may contain collectives
        kind = StepKind(cuts.params, cuts.state, loops, self.options.donates)
        return compilers.ours(self.setup.mesh, kind)

    @checks_names
    def __call__(self, params: Tree, batch: Tree, *args: Tree) -> Tree:
        setup = self.setup
        shardings = setup.param_shardings(params)
        check_batch(batch, self.options)
        check_arguments(args, batch, self.options)
        if is_traced(params, batch, args):
            return self._differentiable(params, batch, *args)
        check_alive("params", params)
        check_alive("batch", batch)
        check_alive("argument", args)
        check_global(batch, setup.mesh)
        params = global_view.laid_out(params, shardings)
        batch = jax.tree.map(global_view.lying_at, batch, self.options.cut.shardings(batch))
        return self._jitted(params, batch, *within_reach(setup, args))

    def _differentiable(self, params: Tree, batch: Tree, *args: Tree) -> Tree:
        """As `_traced`; raises a TypeError with the cure if it is differentiated in forward mode."""
        args = global_view.lying_anywhere(args, self.setup.mesh)
        try:
            return (self._traced if is_staged() else self._jitted)(params, batch, *args)
        except TypeError as error:
            if not any(words in str(error) for words in ("custom_vjp function", "'Unhashable'")):
                raise
            who = "value_and_grad" if self.options.differentiate else "evaluate"
            raise TypeError(
                f"{who}: forward mode (jax.jvp, jacfwd, hessian, linearize) does not support custom backward rules, "
                "which reduce the gradients (nor a loss's own jax.custom_vjp). Use reverse mode a second time, inside "
                "jax.jit: a Hessian times v is jax.grad(lambda p: optax.tree.vdot(grads_fn(p, batch)[1], v))(params)"
            ) from error

    def layout(self, params: Tree, batch: Tree, *args: Tree) -> Layout:
        """The layout, with where and why each parameter is gathered; takes arrays or shapes, compiles nothing."""
        return self.planned_layout(params, self.plan(params, batch, *args))

    def planned_layout(self, params: Tree, plan: LossPlan, state: Tree | None = None) -> Layout:
        """The layout of params and state (as `init` makes it by default), with each parameter's plan in words."""
        found = self.setup.with_state(params, state)
        gathers = {leaf.names: str(each) for leaf, each in zip(found.params, plan.leaves, strict=True)}
        sums = advice.sums_in_words(plan.leaves, plan.options)
        kept = str(advice.kept(plan.program.jaxpr, plan.leaves, self.options))
        return dataclasses.replace(found, gathers=gathers, loss_rows=str(plan), sums=sums, kept=kept)

    def plan(self, params: Tree, batch: Tree, *args: Tree) -> LossPlan:
        """The traced loss and the plan of each parameter; takes the arguments of `layout`."""
        check_batch(batch, self.options)
        check_arguments(args, batch, self.options)
        return self._priced(self._plan(params, batch, args, None), params, batch, args)

    def _priced(self, plan: LossPlan, params: Tree, batch: Tree, args: tuple[Tree, ...]) -> LossPlan:
        """The plan, with what it costs that the loss sees all rows though that was not asked for."""
        if not plan.why_global or plan.options.loss_view != "global":
            return plan
        return dataclasses.replace(plan, price=type(self).price_of(self, params, batch, args))

    def _plan(self, *inputs: Tree) -> LossPlan:
        """The plan in the view that is asked for; by default in the global one where the local one would be wrong."""
        if (view := self.options.loss_view) == "global":
            return self._plan_globally(inputs)
        if self.options.cut.other_axes:
            plan = self._plan_in("local", *inputs)
            constraint = global_loss.constraint_in(plan)
            return self._plan_constrained(constraint, inputs) if constraint else plan
        try:
            plan = self._plan_in("local", *inputs)
        except Exception as error:  # of any type: users' code, on fewer rows than it may have been written for
            parts = axes_of(self.setup.layout(inputs[0]).param_specs) - {*self.setup.batch_axes}  # of params
            if view != "auto" or (self.options.checked and parts) or isinstance(error, PartsError | AxisTypeError):
                raise
            why = f"on one device's rows it raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            try:
                return dataclasses.replace(self._plan_in("global", *inputs), why_global=why)
            except NameError:  # of an axis, which exists in the local view alone
                raise error from None
        if constraint := global_loss.constraint_in(plan):
            return self._plan_constrained(constraint, inputs)
        why = global_loss.why_global(plan) if view == "auto" else ""
        if why and (globally := self._plan_if_global(why, inputs)):
            return globally
        if not plan.program.verdict.is_proved and (text := like_rows(inputs[2], inputs[1])):
            raise ValueError(text)
        return dataclasses.replace(plan, why_global=why)

    def _plan_constrained(self, why: str, inputs: Sequence[Tree]) -> LossPlan:
        """The plan in the global view of a loss that constrains layouts; a ValueError if that view is not for it."""
        if self.options.loss_view == "auto" and (plan := self._plan_if_global(why, inputs)):
            return plan
        raise ValueError(
            f"loss_fn: {why}, but each device computes only its own rows, and no such axis is left to XLA: remove "
            'the constraint, or, if no part of the loss names an axis, pass loss_view="global"'
        )

    def _plan_if_global(self, why: str, inputs: Sequence[Tree]) -> LossPlan | None:
        """The plan in the global view; None for a loss that cannot be traced there: most often it names a mesh axis."""
        with contextlib.suppress(Exception):
            return dataclasses.replace(self._plan_in("global", *inputs), why_global=why)
        return None

    def _plan_globally(self, inputs: Sequence[Tree]) -> LossPlan:
        """The plan in the global view; a ValueError for a loss that is written for the local one."""
        try:
            plan, error = self._plan_in("global", *inputs), None
        except Exception as raised:
            plan, error = None, raised
        if plan is not None and not global_loss.has_pipeline(plan):
            return plan
        with contextlib.suppress(Exception):
            plan = self._plan_in("local", *inputs)
        why = "" if plan is None else global_loss.written_for_parts(plan.program.jaxpr)
        if why:
            raise ValueError(f'loss_fn: {why}, which loss_view="global" does not support; pass loss_view="local"')
        raise error or ValueError("loss_fn: it has a pipeline")

    def _plan_in(self, view: View, params: Tree, batch: Tree, args: tuple[Tree, ...], scale: Scale) -> LossPlan:
        options = dataclasses.replace(self.options, loss_view=view)
        plans = before_the_trace(self.setup.layout(params).params, options)
        inputs = (params, batch, args, scale)
        if view == "global":
            return global_loss.plan(options, plans, *inputs)
        body = self._on_devices(lambda *xs: DeviceLoss(options, plans, *xs).plan(), P(), options)
        plan = jax.eval_shape(body, *inputs)
        arguments.check_parts(plan.program.axes, plan.program.axes_of_parts, batch, self.options)
        return plan

    def _on_devices(self, body: Callable[..., Tree], out_specs: Tree, options: LossOptions) -> Callable[..., Tree]:
        """`body(params, batch, args, scale)` on each device, with its parts of the params and the batch."""
        setup, auto = self.setup, self.setup.config.auto_axes

        def everywhere(params: Tree, batch: Tree, args: tuple[Tree, ...], scale: Scale) -> Tree:
            param_specs = self._without_single(setup.layout(params).param_specs)
            batch_specs = self._without_single(self.options.cut.tree(batch))
            params = global_view.at(params, setup.mesh, param_specs)
            batch = global_view.at(batch, setup.mesh, batch_specs)
            return global_view.shard_map(
                body,
                mesh=setup.mesh,
                in_specs=(jax.tree.map(lambda s: without(s, auto), param_specs), batch_specs, P(), P()),
                out_specs=out_specs,
                axis_names=set(setup.mesh.axis_names) - set(auto),
                check_vma=options.checked,
            )(params, batch, args, scale)

        return everywhere

    def _without_single(self, specs: T) -> T:
        """The PartitionSpecs without axes of size 1, so that types do not name them, and nothing sums over them."""
        single = tuple(axis for axis, size in self.setup.sizes.items() if size == 1)
        return jax.tree.map(lambda spec: without(spec, single), specs)

    def _traced(self, params: Tree, batch: Tree, *args: Tree) -> Tree:
        found = self.measure(params, batch, args)
        value = (found.loss, found.aux) if self.options.has_aux else found.loss
        if not self.options.differentiate:
            return value
        return value, self.setup.with_frozen(found.grads, params, lambda _: jnp.zeros(()))

    def measure(self, params: Tree, batch: Tree, args: tuple[Tree, ...], *, scale: Scale = None) -> "Measured":
        """Loss, aux, weight and gradients, inside a trace; warns of a loss that is not a mean over rows.

        The scalar `scale` multiplies the loss for the backward pass, and divides the reduced gradients.
        """
        plan, setup = self._plan(params, batch, args, scale), self.setup
        options, found, auto = plan.options, setup.layout(params), setup.config.auto_axes
        _warn_if_repeated(plan, setup, axes_of(found.param_specs))
        for text in advice.warnings(plan.program.jaxpr, plan.leaves, options):
            warn(text)
        if options.loss_view == "global":
            self._tell_price(plan, params, batch, args)
            return self._measured(plan, params, *global_loss.run(plan, params, batch, args, scale))
        grad_specs = self._without_single(tuple(jax.tree.leaves(found.grad_specs)))
        of_grads = jax.tree.map(lambda s: without(s, auto), grad_specs) if options.differentiate else P()

        def body(params: Tree, batch: Tree, args: tuple[Tree, ...], scale: Scale) -> Tree:
            return DeviceLoss(options, plan.leaves, params, batch, args, scale).run(plan.program)

        out_specs = (P(), self._without_single(P(self.options.cut.row_axes)), of_grads)
        values, rows, grads = self._on_devices(body, out_specs, options)(params, batch, args, scale)
        if not self.options.is_meant:
            global_loss.warn_if_wrong(plan)
        if options.differentiate:
            grads = global_view.at(grads, setup.mesh, grad_specs) if auto else grads
        return self._measured(plan, params, values, rows, grads)

    def _tell_price(self, plan: LossPlan, params: Tree, batch: Tree, args: tuple[Tree, ...]) -> None:
        """Warns, once, if it costs much that the loss sees all rows."""
        if self._is_told or not plan.why_global:
            return
        self._is_told = True
        price = self._priced(plan, params, batch, args).price
        if price is not None and price.is_high:
            warn(
                f"loss_fn: the loss is computed on all rows at once: {plan.why_global}\n{price}. docs/loss.md lists "
                'equivalent forms for the local view; loss_view="global" silences this warning.'
            )

    def _measured(
        self, plan: LossPlan, params: Tree, values: Tree, rows: Sequence[jax.Array], grads: Sequence[jax.Array]
    ) -> "Measured":
        """The loss's results, with aux and gradients as trees."""
        loss, averaged, weight = values
        if self.options.differentiate:
            grads = jax.tree.unflatten(jax.tree.structure(self.setup.trained(params)), grads)
        return Measured(loss, _put_together(plan, averaged, rows), weight, grads)


class Measured(NamedTuple):
    """Over the whole batch: the loss, aux, weight (1 unless weighted), and the gradients."""

    loss: jax.Array
    aux: Tree
    weight: jax.Array
    grads: Tree


def _put_together(plan: LossPlan, averaged: Sequence[jax.Array], rows: Sequence[jax.Array]) -> Tree:
    """aux, from its averaged leaves and its leaves with the batch's rows in the first dim."""
    program, rest, with_rows = plan.program, iter(averaged), iter(rows)
    leaves = [next(rest) if dim is None else jnp.moveaxis(next(with_rows), 0, dim) for dim in program.row_dims]
    return jax.tree.unflatten(program.out_tree, [None, None, *leaves])[2]


def _warn_if_repeated(plan: LossPlan, setup: Setup, cut_over: set[str]) -> None:
    """Warns of mesh axes along which all devices do the same work on the same rows."""
    used = {*setup.batch_axes, *setup.config.auto_axes, *cut_over, *plan.program.axes}
    idle = {axis: size for axis, size in setup.sizes.items() if size > 1 and axis not in used}
    if idle:
        warn(
            f"{setup.config.strategy}: all devices along the mesh axes {idle} do the same work: the batch is split "
            f"over {setup.batch_axes}, and neither specs nor the loss name them. Name them in data_axes= or "
            "replica_axes=, shard params over them with specs=, or make the mesh without them"
        )
