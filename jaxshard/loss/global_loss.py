"""The loss in the global view: it sees all rows of a microbatch, as on one device, and XLA partitions it.

Params stay cut until `unshard`, or else until the loss begins; there they are laid out whole. The gradients of each
microbatch are laid out as the strategy cuts them, so that no device holds more of their sums.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Self

import jax
from jax.sharding import PartitionSpec as P

from jaxshard import platforms
from jaxshard.base.tree import named_leaves, path_of
from jaxshard.base.types import AnyMesh, Equation, Jaxpr, Names, Tree
from jaxshard.collectives import global_view
from jaxshard.loss.arguments import LossOptions
from jaxshard.loss.params import uses
from jaxshard.loss.params.leaf_plan import LeafPlan, as_used, with_casts
from jaxshard.loss.params.lookup import Lookup, exchanged, in_global_view, is_cut_by_rows
from jaxshard.loss.params.unshard import AtFirstUse, Sharded, Value, deferred
from jaxshard.loss.per_device import DeviceLoss, Index, LossPlan
from jaxshard.programs.jaxprs import axes_of_equation, equations, open_jaxpr
from jaxshard.programs.primitives import CASTS, CONSTRAINT, UNPARTITIONED
from jaxshard.programs.questions import variables_that_depend
from jaxshard.programs.rerun import followed
from jaxshard.programs.rows.verdict import RowsWarning
from jaxshard.programs.source import line_of
from jaxshard.system.users_lines import warn


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Constrained(Sharded):
    """A parameter, `stand_in`, that XLA lays out; `whole()` lays it out whole, and its gradient as it is to be summed.

    Attributes:
      mesh, spec, grad_spec: of the whole parameter and of its gradient. A scan over layers slices their first dims off.
      table: how it is cut, if the loss only looks rows up in it: it stays cut, and these rows are moved.
      table_spec, row_axes: of such a table, and of the dim of ids.
    """

    mesh: AnyMesh | None = dataclasses.field(default=None, metadata={"static": True})
    spec: P = dataclasses.field(default=P(), metadata={"static": True})
    grad_spec: P = dataclasses.field(default=P(), metadata={"static": True})
    ndim: int = dataclasses.field(default=0, metadata={"static": True})
    table: tuple[tuple[int, Names], ...] = dataclasses.field(default=(), metadata={"static": True})
    table_spec: P = dataclasses.field(default=P(), metadata={"static": True})
    row_axes: Names = dataclasses.field(default=(), metadata={"static": True})

    @property
    def looked_up_by(self) -> tuple[tuple[int, Names], ...]:
        """How a table is cut for lookups that move rows; () if it is none."""
        return self.table

    def rows(self, ids: jax.Array, how: Lookup) -> jax.Array:
        """The rows of these ids: each device finds what it has of all, and sends it to their devices."""
        assert self.stand_in is not None
        assert self.mesh is not None
        if ids.shape[0] % math.prod(self.mesh.shape[axis] for axis in self.row_axes):
            return how.rows(self.whole(), ids)
        table = self.cast(_whole(self._narrow(self.stand_in), self.mesh, self.table_spec, self.grad_spec))
        if is_cut_by_rows(table, self.table):

            def of_device(local: jax.Array, ids: jax.Array) -> jax.Array:
                return exchanged(local, ids, how, self.table, is_shard=True)

            mesh, rows = None if global_view.is_explicit(self.mesh) else self.mesh, P(self.row_axes)
            specs = (self.table_spec, rows)
            return jax.shard_map(of_device, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)(table, ids)
        found = how.rows(table, ids)
        free = [P.UNCONSTRAINED] * (found.ndim - 1)
        return global_view.constrained(found, self.mesh, P(self.row_axes, *free))

    def without_slot(self) -> Self:  # its gradient slot is the parameter
        return self

    def gathered(self) -> jax.Array:
        """The parameter, laid out whole over the batch axes."""
        assert self.stand_in is not None
        assert self.mesh is not None
        first = self.ndim - self.stand_in.ndim
        specs = [P(*(*spec, *[None] * (self.ndim - len(spec)))[first:]) for spec in (self.spec, self.grad_spec)]
        return _whole(self._narrow(self.stand_in), self.mesh, *specs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _whole(x: jax.Array, mesh: AnyMesh, spec: P, grad_spec: P) -> jax.Array:
    del grad_spec
    return global_view.constrained(x, mesh, spec)


def _whole_forward(x, mesh, spec, grad_spec):
    return _whole(x, mesh, spec, grad_spec), None


def _whole_backward(mesh, spec, grad_spec, kept, cotangent):
    del spec, kept
    return (global_view.constrained(cotangent, mesh, grad_spec),)


_whole.defvjp(_whole_forward, _whole_backward)


class GlobalLoss(DeviceLoss):
    """The loss of all rows, and its gradients; `params` and `batch` are global arrays, and XLA partitions."""

    def _parts(self) -> tuple[tuple[str, ...], int]:
        return (), 1

    def _in_microbatches(self, x: jax.Array) -> jax.Array:
        """(rows, ...) -> (microbatches, rows of each, ...): the i-th is made of the i-th part of each device's rows."""
        m, shards = self.options.microbatches, self.setup.num_batch_shards
        x = x.reshape(shards, m, x.shape[0] // (shards * m), *x.shape[1:]).swapaxes(0, 1)
        return self._constrained(x.reshape(m, -1, *x.shape[3:]), P(None, self.setup.batch_axes))

    def _in_order(self, x: jax.Array) -> jax.Array:
        """Undoes `_in_microbatches`."""
        m, shards = self.options.microbatches, self.setup.num_batch_shards
        x = x.reshape(m, shards, x.shape[1] // shards, *x.shape[2:]).swapaxes(0, 1)
        return self._constrained(x.reshape(-1, *x.shape[3:]), P(self.setup.batch_axes))

    def _constrained(self, x: jax.Array, spec: P) -> jax.Array:
        return global_view.constrained(x, self.setup.mesh, spec)

    def plan(self) -> LossPlan:
        """As `DeviceLoss.plan`; the rows of products of activations and weights stay on their devices.

        Otherwise XLA may lay activations out as the gradients of weights are cut: along features, with all rows.
        """
        found, shards = super().plan(), self.setup.num_batch_shards
        num_rows = jax.tree.leaves(self.batch)[0].shape[1]
        if shards == 1 or num_rows % shards:
            return found
        by_rows = [role == "batch" for role in found.program.roles]
        jaxpr = followed(found.program.jaxpr, by_rows, num_rows, variables_that_depend, self._rows_stay)
        return dataclasses.replace(found, program=dataclasses.replace(found.program, jaxpr=jaxpr))

    def _rows_stay(self, x: jax.Array, dim: int) -> jax.Array:
        spec: list[Any] = [P.UNCONSTRAINED] * x.ndim
        spec[dim] = self.setup.batch_axes
        return self._constrained(x, P(*spec))

    def _at_the_start(self, x: jax.Array, plan: LeafPlan) -> jax.Array:
        return self._constrained(x, plan.leaf.spec) if plan.gather == "start" else x

    def _after_the_trace(self, jaxpr: Jaxpr) -> tuple[LeafPlan, ...]:
        return tuple(self._by_uses(jaxpr, i, plan) for i, plan in enumerate(self.plans))

    def _by_uses(self, jaxpr: Jaxpr, index: int, plan: LeafPlan) -> LeafPlan:
        plan = with_casts(plan, jaxpr, index, self.options)
        reason = uses.why_not_lazy(jaxpr, index, plan.leaf.dims, looked_up_by=(), cast=plan.computed_in is not None)
        inputs, table = open_jaxpr(jaxpr), plan.table_dims if plan.held else ()
        var, is_cut_further = inputs.invars[index], any(plan.leaf.spec)
        looks_up = bool(table) and uses.only_looked_up(inputs, var, table)
        looks_up = looks_up and not (is_cut_further and is_cut_by_rows(var.aval, table))
        return as_used(plan, inputs, var, reason=reason, looks_up=looks_up)

    def _differentiated(self) -> list[jax.Array]:
        return [x for x, plan in zip(self.shards, self.plans, strict=True) if not plan.leaf.frozen]

    def _values(self, shards: Sequence[jax.Array], diff: Sequence[jax.Array]) -> list[Value]:
        rest = iter(diff)

        def value(x: jax.Array, plan: LeafPlan) -> Value:
            x, leaf = x if plan.leaf.frozen else next(rest), plan.leaf
            specs = {"mesh": self.setup.mesh, "spec": leaf.spec, "grad_spec": leaf.grads.spec}
            found = Constrained(None, x, (), plan.held, (), plan.computed_in, **specs, ndim=x.ndim)
            if not plan.looks_up:
                return found
            rows = self.setup.batch_axes
            return dataclasses.replace(found, table=plan.table_dims, table_spec=leaf.params.spec, row_axes=rows)

        return [value(x, plan) for x, plan in zip(shards, self.plans, strict=True)]

    def _at_first_use(self, x: Value) -> Value:
        assert isinstance(x, Constrained)
        return AtFirstUse(x) if x.table or (x.held and self.options.regathers) else x.whole()

    def _folded(self, index: Index) -> Tree:
        """The further arguments; each of several microbatches has keys of its own."""
        return self.args if self.options.microbatches == 1 else super()._folded(index)

    def _scattered_here(self, g: jax.Array, plan: LeafPlan) -> jax.Array:
        return self._constrained(g, plan.leaf.grads.spec)

    def _total(self, g: jax.Array, plan: LeafPlan) -> jax.Array:
        return self._constrained(g, plan.leaf.cut)


def plan(options: LossOptions, plans: Sequence[LeafPlan], *inputs: Tree) -> LossPlan:
    """The loss of (params, batch, args, scale), traced in the global view."""
    with global_view.auto_context(options.setup.mesh), in_global_view(options.setup.sizes):
        return jax.eval_shape(lambda *xs: GlobalLoss(options, plans, *xs).plan(), *map(_without_shardings, inputs))


def run(plan: LossPlan, *inputs: Tree) -> Tree:
    """As `DeviceLoss.run`, of (params, batch, args, scale), global arrays, inside a trace."""
    options, program = plan.options, plan.program
    params, batch, *_ = inputs
    rows, num_rows = P(options.setup.batch_axes), jax.tree.leaves(batch)[0].shape[0]
    aux = zip(program.jaxpr.out_avals[2:], program.row_dims, strict=True)
    averaged = [rows if x.shape[:1] == (num_rows,) else P() for x, dim in aux if dim is None]
    with_rows = [rows for dim in program.row_dims if dim is not None]
    grads = tuple(jax.tree.leaves(options.setup.layout(params).grad_specs)) if options.differentiate else ()

    def body(*inputs: Tree) -> Tree:
        with in_global_view(options.setup.sizes), platforms.on(options.setup.mesh):
            return GlobalLoss(options, plan.leaves, *inputs).run(program)

    return global_view.globally(body, options.setup.mesh, ((P(), averaged, P()), with_rows, grads))(*inputs)


def _without_shardings(tree: Tree) -> Tree:
    shapes = jax.eval_shape(lambda: tree)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type), shapes)


# Whether a loss may run on each device's rows.


def why_global(plan: LossPlan) -> str:
    """Why averaging over devices may change the loss or a leaf of aux; "" if it is proved that it does not.

    Also "" for a loss that XLA cannot partition, or that names axes of the mesh: its author has the local view in mind.
    """
    verdict, program = plan.program.verdict, plan.program.jaxpr
    if verdict.alone or plan.options.setup.config.rows == "mixed" or written_for_parts(program, but=CASTS):
        return ""  # JAX itself casts types over axes; if the user did, the loss cannot be traced in the global view
    if verdict.in_microbatches:  # which are the same in the global view
        return ""
    own = f'{verdict.unknown}. If it is a mean over rows, pass loss_view="local".'
    return verdict.problem or (own if verdict.unknown else next(_wrong_aux(plan), ""))


def _wrong_aux(plan: LossPlan) -> Iterator[str]:
    """The leaves of aux whose average over devices is not one device's result, with why."""
    program = plan.program
    outputs = jax.tree.unflatten(program.out_tree, range(program.out_tree.num_leaves))
    for names, number in named_leaves(outputs[2]):
        why = program.verdict.averaged[number] if program.verdict.averaged else ""
        if why:
            yield f"{f'aux leaf {path_of(names)}' if names else 'aux'} {why}"


def has_pipeline(plan: LossPlan) -> bool:
    """Whether a part of the loss runs on the stages of a pipeline."""
    return uses.defers(plan.program.jaxpr)


def written_for_parts(jaxpr: Jaxpr, but: frozenset[str] = frozenset()) -> str:
    """Why a traced loss has to run on each device's rows, with the user's line, or "". Those in `but` may name axes."""
    for eqn in equations(jaxpr):
        axes = axes_of_equation(eqn) if eqn.primitive.name not in but else []
        if deferred(eqn) is not None:
            return _at_line("it has a pipeline", eqn)
        if axes:
            return _at_line(f"it names the mesh axes {axes}", eqn)
        if eqn.primitive.name in UNPARTITIONED:
            return _at_line("it has an operation that XLA cannot partition", eqn)
    return ""


def constraint_in(plan: LossPlan) -> str:
    """That a loss constrains a layout along axes that the local view has taken, with the line; "" if it does not."""
    for eqn in equations(plan.program.jaxpr):
        spec = getattr(eqn.params["sharding"], "spec", ()) if eqn.primitive.name == CONSTRAINT else ()
        names = jax.tree.leaves(tuple(spec))
        if axes := [x for x in names if isinstance(x, str) and x not in plan.options.setup.config.auto_axes]:
            return _at_line(f"it constrains the layout of a value along the mesh axes {axes}", eqn)
    return ""


def _at_line(what: str, eqn: Equation) -> str:
    line = line_of([eqn])
    return f"{what} ({line})" if line else what


def warn_if_wrong(plan: LossPlan) -> None:
    """Warns of a loss on each device's rows that is not a mean over rows, of such outputs, and of such leaves of
    aux."""
    verdict, options = plan.program.verdict, plan.options
    if verdict.problem:
        of_outputs = "predict: an output depends on more than its own row"
        what = of_outputs if options.per_row else "loss_fn: the loss is not a mean over rows"
        warn(f"{what}: {verdict.problem}", RowsWarning)
    elif plan.why_global:
        warn(
            f"loss_fn: the loss is not known to be a mean over rows: {plan.why_global}; and it cannot be traced with "
            f"all rows at once, where any loss would be correct. To use only the rows of each device on purpose, pass "
            'loss_view="local".',
            RowsWarning,
        )
    for text in () if options.per_row or verdict.alone else _wrong_aux(plan):
        warn(text, RowsWarning)
