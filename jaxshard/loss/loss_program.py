"""The loss function as a traced program, checked before anything runs."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from jaxshard.base.tree import is_key, is_like_raw_key, named_leaves, path_of, sum_dtype, unflatten, without_boxes
from jaxshard.base.types import CUT_ALONG, Jaxpr, Names, Tree, TreeDef, axes_of
from jaxshard.loss.arguments import LossOptions, like_rows
from jaxshard.loss.loss_report import explained, form_of, no_rows, noted, parts_of_rows
from jaxshard.loss.params import unshard
from jaxshard.loss.params.unshard import Scale
from jaxshard.programs.jaxprs import axes_named, equations, with_backward_pass
from jaxshard.programs.primitives import OWN_BACKWARD, READS_KEYS, mark_of
from jaxshard.programs.questions import depends, reaches, varies_smoothly
from jaxshard.programs.rows.microbatches import Found, recording
from jaxshard.programs.rows.verdict import Question, Verdict, judge
from jaxshard.system.users_lines import named_as

ENDS_TRAIL = True  # for `programs.source`: users' functions run inside ours


@dataclasses.dataclass(frozen=True)
class Program:
    """The traced loss: its flat inputs are (params, batch, args, scale), its flat outputs (loss, weight, aux).

    Attributes:
      verdict: the findings about its rows.
      roles: the role of each input.
    """

    jaxpr: Jaxpr
    out_tree: TreeDef
    verdict: Verdict
    roles: tuple[str, ...]

    @property
    def row_dims(self) -> tuple[int | None, ...]:
        """For each leaf of aux, the dim that holds the batch's rows, or None."""
        return self.verdict.row_dims[2:] or (None,) * (self.out_tree.num_leaves - 2)

    @property
    def axes(self) -> set[str]:
        """The mesh axes that the loss names."""
        return axes_named(self.jaxpr)

    @property
    def axes_of_parts(self) -> set[str]:
        """The mesh axes along which the loss takes rows to be cut."""
        marks = map(mark_of, equations(self.jaxpr))
        return {mark.removeprefix(CUT_ALONG) for mark in marks if mark.startswith(CUT_ALONG)}

    @property
    def roles_of_args(self) -> list[str]:
        """The role of each leaf of the further arguments; "key" and "raw key" are folded."""
        return [role for role in self.roles if role in ("key", "raw key", "other")]

    @classmethod
    def trace(
        cls,
        options: LossOptions,
        treedef: TreeDef,
        whole: Sequence[Tree],
        batch: Tree,
        args: tuple[Tree, ...],
        scale: Scale,
        frozen: Sequence[bool],
        cut: Sequence[Mapping[str, int]],
    ) -> "Program":
        """Traces the loss of whole params (a list of shapes, some of them frozen), a microbatch and further arguments.

        `cut`: the axes that split the batch and by which a param is cut in the loss, each with the dim.

        Raises:
          TypeError: `loss_fn` does not return what the options say, or returns values that cannot be averaged.
        """

        found: Found = []

        def flat(params, batch, args, scale, parts=None):
            with unshard.scaled_by(scale), recording(found, parts):
                return _normal_form(options.loss_fn(without_boxes(params), batch, *args), options)

        named_as(flat, options.loss_fn)

        try:
            jaxpr, shapes = jax.make_jaxpr(flat, return_shape=True)(unflatten(treedef, whole), batch, args, scale)
        except (KeyError, NameError, TypeError, ValueError) as error:
            part = "a microbatch" if options.loss_view == "global" else "a device's microbatch"
            told = explained(error, options.checked, options.setup.sizes), batch, args, options.num_parts, part
            raise noted(*told, like_rows(args, batch, options.num_parts)) from error
        roles = ["frozen" if yes else "param" for yes in frozen] + ["batch"] * len(jax.tree.leaves(batch))
        roles += _roles_of(args, options) + ["scale"] * (scale is not None)
        _check_whole(jaxpr, shapes, options)
        if varies_smoothly(jaxpr, [role == "param" for role in roles])[1]:
            raise TypeError(
                "loss_fn: the weight depends on the params, and weighted=True ignores its gradient; return loss_sum / "
                "weight without weighted=True, or, if it is to be ignored, jax.lax.stop_gradient(weight)"
            )

        def of_rows(num_rows: int, gone: Names, parts: int | None) -> Jaxpr:
            batch_of_rows = jax.tree.map(lambda x: x.update(shape=(num_rows, *x.shape[1:])), batch)
            leaves = [_joined(x, each, gone, options) for x, each in zip(whole, cut, strict=True)]
            params = unflatten(treedef, leaves)
            run = functools.partial(flat, parts=parts)
            traced = jax.make_jaxpr(run, axis_env=[(axis, 1) for axis in gone] or None)
            return traced(params, batch_of_rows, args, scale)

        read = _read_as_keys(jaxpr, [role == "raw key" for role in roles])
        roles = ["other" if x == "raw key" and not is_read else x for x, is_read in zip(roles, read, strict=True)]
        verdict = _verdict(jaxpr, of_rows, roles, batch, options, cut, has_parts=bool(found))
        program = cls(jaxpr, jax.tree.structure(shapes), verdict, tuple(roles))
        if options.num_parts > 1 or options.loss_view != "global":
            _check_aux(program, shapes, options)
            _check_rows_of_aux(program, shapes, batch, options)
        elif options.per_row:
            _check_outputs(shapes, jax.tree.leaves(batch)[0].shape[0])
        return program


def _read_as_keys(jaxpr: Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Which of these inputs the loss, or a custom backward pass in it, reads as keys."""
    if not any(inputs):
        return [False] * len(inputs)
    if any(eqn.primitive.name in OWN_BACKWARD for eqn in equations(jaxpr)):
        jaxpr = with_backward_pass(jaxpr)
    return reaches(jaxpr, READS_KEYS, inputs)


def _roles_of(args: tuple[Tree, ...], options: LossOptions) -> list[str]:
    def role(x: Tree) -> str:
        if not options.fold_keys:
            return "other"
        return "key" if is_key(x) else "raw key" if is_like_raw_key(x) else "other"

    return [role(x) for x in jax.tree.leaves(args)]


def _verdict(
    jaxpr: Jaxpr,
    trace: Callable[[int, Names, int | None], Jaxpr],
    roles: list[str],
    batch: Tree,
    options: LossOptions,
    cut: Sequence[Mapping[str, int]],
    *,
    has_parts: bool,
) -> Verdict:
    """The verdict on the loss's rows; `has_parts`: parts of it run in microbatches of their own."""
    setup, is_global = options.setup, options.loss_view == "global"
    if (alone := is_global or options.cut.num_row_parts == 1) and not (options.has_aux or has_parts):
        return Verdict(alone=True)
    question = Question(
        trace=trace,
        num_rows=jax.tree.leaves(batch)[0].shape[0],
        batch=[role == "batch" for role in roles],
        folded=[role in ("key", "raw key") or not options.fold_keys for role in roles],
        weighted=options.weighted,
        per_row=options.per_row,
        differentiated=options.differentiate,
        split={} if is_global else {axis: n for axis in options.cut.row_axes if (n := setup.sizes[axis]) > 1},
        parts=_num_compared(options),
        cut=[*cut, *[{}] * (len(roles) - len(cut))] if any(cut) else (),
    )
    found = judge(question, jaxpr)
    if not alone:
        return found
    problem = found.problem if found.in_microbatches else ""
    found = dataclasses.replace(found, problem=problem, unknown="", averaged=(), alone=True)
    return found if options.num_parts > 1 else dataclasses.replace(found, folded=(), counted=())


def _joined(x: Tree, cut: Mapping[str, int], gone: Names, options: LossOptions) -> Tree:
    """The shape of a param once the axes `gone`, over which it was cut, have size 1."""
    shape = list(x.shape)
    for axis, dim in cut.items():
        shape[dim] *= options.setup.sizes[axis] if axis in gone else 1
    return x.update(shape=tuple(shape)) if any(axis in gone for axis in cut) else x


def _num_compared(options: LossOptions) -> int:
    """The number of devices that the rows are split over, in a proof; of two, aux shows where it has rows."""
    return 2 if options.loss_view == "global" else max(options.cut.num_row_parts, 2)


def _normal_form(out: Tree, options: LossOptions) -> tuple[jax.Array, jax.Array, Tree]:
    """(loss, weight, aux) from the form that `loss_fn` returns."""
    aux = ()
    if options.has_aux:
        if not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(f"loss_fn: has_aux=True needs (loss, aux), got {form_of(out)}")
        out, aux = out
    weight = jnp.ones(())
    if options.weighted:
        if not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(f"loss_fn: weighted=True needs (loss_sum, weight), got {form_of(out)}")
        out, weight = out
        weight = jnp.asarray(weight, jnp.result_type(float))
        if weight.shape:
            raise TypeError(f"loss_fn: the weight must be a scalar, got shape {weight.shape}; sum it over the rows")
    if out is None or isinstance(out, tuple | list | dict):
        raise TypeError(f"loss_fn: returned a {type(out).__name__}, not a scalar; set has_aux or weighted")
    loss = jnp.asarray(out)
    if loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(
            f"loss_fn: the loss must be a floating scalar, got {loss.dtype}{list(loss.shape)}; take its mean"
        )
    loss = loss.astype(sum_dtype(loss))  # bf16 is too narrow for the sum over devices
    return loss, weight, jax.tree.map(jnp.asarray, aux)


def _check_whole(jaxpr: Jaxpr, shapes: Tree, options: LossOptions) -> None:
    """Refuses a loss, weight or aux leaf that differs over a model axis: it comes from shards, without a sum."""
    if not options.checked:
        return
    kinds = ("loss", "weight", "aux leaf")
    for (names, _), out in zip(named_leaves(shapes), jaxpr.out_avals, strict=True):
        if others := sorted(out.manual_axis_type.varying - set(options.setup.batch_axes)):
            what = " ".join((kinds[int(names[0])], *([path_of(names[1:])] if names[1:] else [])))
            raise TypeError(
                f"loss_fn: the {what} differs over {others}: it was computed from shards, and not summed. End blocks "
                "with jaxshard.tensor.row_parallel, gather a sharded sequence with join_sequence, and sum terms of "
                "parameters (an L2 norm) with jaxshard.tensor.sum_shards, which leaves replicated ones unchanged"
            )


def _check_aux(program: Program, shapes: Tree, options: LossOptions) -> None:
    """Refuses aux leaves that depend on the batch or on folded keys, and cannot be averaged.

    Leaves that keep the batch's rows need no average; for keys, the first device's count.
    """
    differs = [role in ("batch", "key", "raw key") for role in program.roles]
    outs = depends(program.jaxpr, differs, frozenset(options.setup.batch_axes) if options.microbatches == 1 else None)
    row_dims, folded_rows = (None, None, *program.row_dims), program.verdict.folded or (False,) * len(outs)
    if any(program.verdict.counted):
        _refuse_counts(program, shapes, depends(program.jaxpr, [role == "batch" for role in program.roles]))
    for (names, leaf), varies, row_dim, folded in zip(named_leaves(shapes), outs, row_dims, folded_rows, strict=True):
        if names[0] != "2" or row_dim is not None:
            continue
        if folded and not options.per_row and options.loss_view == "global":
            raise ValueError(
                f"loss_fn: aux leaf {path_of(names[1:])} has shape {leaf.shape}, in which the batch's rows share a dim "
                "with something else, or have a different order, as after a sort, a cumulative sum or a roll of rows, "
                "so microbatches cannot be joined: give microbatches=1, or return the values it is computed from, as "
                "(rows, ...)"
            )
        if folded and not options.per_row:
            cause = f". The loss may show the cause: {program.verdict.problem}" if program.verdict.problem else ""
            raise ValueError(
                f"loss_fn: aux leaf {path_of(names[1:])} has shape {leaf.shape}, in which the batch's rows share a dim "
                "with something else, have a different order, or depend on their number, their positions, or this "
                "device's other rows, so unrelated rows would be averaged; return it as (rows, ...), or its "
                f"mean{cause}"
            )
        if options.per_row:
            raise no_rows(path_of(names[1:]), leaf.shape)
        if varies and not jnp.issubdtype(leaf.dtype, jnp.inexact) and not is_key(leaf):
            parts = "microbatches" if options.loss_view == "global" or options.num_parts == 1 else "devices"
            raise TypeError(
                f"loss_fn: aux leaf {path_of(names[1:])} has dtype {leaf.dtype} and depends on the batch, so it "
                f"differs between {parts} and cannot be averaged; return it per row, or cast it to a floating dtype"
            )


def _check_rows_of_aux(program: Program, shapes: Tree, batch: Tree, options: LossOptions) -> None:
    """Refuses aux leaves with rows of which each device may have another part."""
    axes = options.cut.other_axes
    if not axes:
        return
    is_cut = iter(bool(axes_of(spec) & {*axes}) for spec in options.cut.specs(batch))
    differs = [next(is_cut) if role == "batch" else role in ("key", "raw key") for role in program.roles]
    parts = depends(program.jaxpr, differs, frozenset(axes))
    for (names, leaf), dim, is_part in zip(named_leaves(shapes), (None, None, *program.row_dims), parts, strict=True):
        if dim is not None and is_part:
            raise parts_of_rows(options.per_row, path_of(names[1:]), leaf.shape, axes)


def _check_outputs(shapes: Tree, num_rows: int) -> None:
    """Refuses outputs of `predict` without a dim of all rows."""
    for names, leaf in named_leaves(shapes):
        if names[0] == "2" and num_rows not in leaf.shape:
            raise no_rows(path_of(names[1:]), leaf.shape)


def _refuse_counts(program: Program, shapes: Tree, by_row: Sequence[bool]) -> None:
    """Refuses aux leaves that depend on the number of rows of one device's microbatch, such as `len(x)`."""
    for (names, leaf), counted, varies in zip(named_leaves(shapes), program.verdict.counted, by_row, strict=False):
        if names[0] == "2" and counted and not varies:
            raise TypeError(
                f"loss_fn: aux leaf {path_of(names[1:])} ({leaf.dtype}) is computed from the number of rows that the "
                "loss sees, such as len(x) or x.shape[0]: the rows of one device's microbatch, not of the batch. Take "
                "the number from the batch outside the loss; or return jnp.ones(len(x)), which comes back with all "
                "rows, and sum it"
            )
