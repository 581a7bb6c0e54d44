"""`check`: computes a loss and its gradients again with the batch's rows distributed differently, and compares."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxshard import platforms
from jaxshard.base.tree import named_leaves, path_of, sum_dtype
from jaxshard.base.types import Jaxpr, Tree, processes_of
from jaxshard.collectives import global_view
from jaxshard.layout.options import Config
from jaxshard.loss.arguments import LossOptions, check_options
from jaxshard.loss.gradients import LossFn, LossFunction
from jaxshard.loss.loss_report import LossDifference, LossReport, RowsError, or_inf
from jaxshard.mesh import check_has_devices
from jaxshard.optimizer.optimizer import ShardedOptimizer, setup_of
from jaxshard.optimizer.sharding import Setup
from jaxshard.platforms.platform import Platform
from jaxshard.programs.jaxprs import axes_named, equations, open_jaxpr
from jaxshard.system.text import checks_names

_WITHIN, _ACROSS, _PARTS, _TWICE, _ALONE = (
    "rows in another order on each device",
    "rows on other devices",
    "rows in twice as many parts",
    "each row twice, on two devices",
    "all rows on one device",
)
_UNKNOWN_BYTES = 2**30  # assumed free memory of a device that does not report it


@checks_names
def check(
    loss_fn: LossFn,
    opt: ShardedOptimizer,
    params: Tree,
    batch: Tree,
    *args: Tree,
    has_aux: bool = False,
    microbatches: int = 1,
    weighted: bool = False,
    batch_specs: Tree = None,
    raises: bool = False,
) -> LossReport:
    """Tests numerically whether a loss is a mean of independent rows, which data parallelism may average.

    Computes the loss and all gradients again with the same rows distributed differently, which changes a correct loss
    only by rounding: in another order on each device, on other devices, in twice as many parts (or each row twice); and
    on one device, if the program fits there. Before that last test, every array stays sharded as in training.

    Args:
      loss_fn, opt, has_aux, microbatches, weighted, batch_specs: as for `value_and_grad`.
      params: placed on the mesh, or not yet.
      batch: a tree of (rows, ...), of the size used in training.
      *args: further arguments of the loss. Random numbers hide errors: turn dropout off.
      raises: raise a `RowsError` if the loss is wrong.

    Returns:
      A `LossReport`.

    Raises:
      RowsError: a ValueError with the report as its message, if `raises`.
    """
    setup = setup_of(opt, "check", loss_fn)
    options = LossOptions(
        loss_fn, setup, has_aux, microbatches, weighted, fold_keys=True, loss_view="local", batch_specs=batch_specs
    )
    check_options("check", options)
    report = _Comparison(options, params, batch, args).report()
    if raises and not report.ok:
        raise RowsError(report)
    return report


class _Comparison:
    """The loss and gradients of a batch as given, and of the same rows distributed differently."""

    def __init__(self, options: LossOptions, params: Tree, batch: Tree, args: tuple[Tree, ...]):
        setup = options.setup
        self.options, self.params, self.args = options, params, args
        self.program = LossFunction(self.options).plan(params, batch, *args).program
        rows, shardings = options.cut.tree(batch), options.cut.shardings(batch)
        self.batch = jax.tree.map(global_view.lying_at, batch, shardings)

        def dealt(batch: Tree, *how: Any) -> Tree:
            return global_view.globally(lambda batch: _dealt(batch, *how), setup.mesh, rows)(batch)

        self._jitted = jax.jit(dealt, static_argnums=(1, 2, 3), out_shardings=shardings)
        self.parts = options.num_parts
        self.rows = jax.tree.leaves(batch)[0].shape[0] // self.parts // self.program.verdict.group
        self.loss, self.grads = self._of(self.options, self.batch)

    def _of(self, options: LossOptions, batch: Tree) -> tuple[jax.Array, Tree]:
        value, grads = LossFunction(options)(self.params, batch, *self.args)
        return (value[0] if options.has_aux else value), grads

    def _dealt(self, way: str) -> Tree:
        return self._jitted(self.batch, self.parts, self.program.verdict.group, way)

    def report(self) -> LossReport:
        notes = list[str]()
        differences = self._ways(notes)
        try:
            differences[_ALONE] = self._difference(*self._alone())
        except _NotCompared as why:
            notes.append(f"not compared with one device: {why}")
        tolerance = self._tolerance(differences)
        wrong = [name for name, found in differences.items() if found.exceeds(tolerance)]
        causes: tuple[str, ...] = ()
        if wrong:
            problem = self.program.verdict.problem
            has_parts, is_random = bool(self.options.cut.other_axes), self._is_random(tolerance)
            causes = _causes(wrong, differences, tolerance, problem, is_random, has_parts)
        return LossReport(not wrong, float(self.loss), differences, tolerance, causes, tuple(notes))

    def _ways(self, notes: list[str]) -> dict[str, LossDifference]:
        """The differences on the same devices, by the way in which rows are distributed.

        Adds a sentence to `notes` if the loss cannot run with another number of rows.
        """
        found, options = dict[str, LossDifference](), self.options
        if self.rows > 1:
            found[_WITHIN] = self._difference(*self._of(options, self._dealt(_WITHIN)))
        if self.parts > 1:
            found[_ACROSS] = self._difference(*self._of(options, self._dealt(_ACROSS)))
        if axes_named(self.program.jaxpr) & set(options.setup.split_axes) - set(options.cut.other_axes):
            return found  # a loss with collectives may depend on the number of rows: the number of negatives
        failed = ""
        for way in (_PARTS, _TWICE)[self.rows % 2 :]:
            try:
                return found | {way: self._difference(*self._with_other_numbers(way))}
            except Exception as error:  # of any type: it is the user's own code, on another number of rows
                failed = str(error).partition("\n")[0]
        notes.append(f"not compared with other numbers of rows on each device: the loss fails there: {failed:.200}")
        return found

    def _with_other_numbers(self, way: str) -> tuple[jax.Array, Tree]:
        """Loss and gradients with half as many rows at a time, or twice as many."""
        if way == _TWICE:
            return self._of(self.options, self._dealt(_TWICE))
        return self._of(dataclasses.replace(self.options, microbatches=2 * self.options.microbatches), self.batch)

    def _difference(self, loss: jax.Array, grads: Tree) -> LossDifference:
        pairs = jax.tree.map(lambda mine, other: global_view.lying_at(other, mine.sharding), self.grads, grads)
        far, sizes = jax.device_get(jax.jit(_norms)(self.grads, pairs))
        params = jax.device_get(jax.jit(_norms)(self.params, self.params))[1]
        whole = math.sqrt(sum(float(size) ** 2 for size in sizes))
        steep = abs(float(self.loss)) / (math.sqrt(sum(float(size) ** 2 for size in params)) or 1.0)
        least = 1e-3 * max(whole, steep) or 1.0  # smaller gradients hardly move the loss, and may be mostly rounding
        paths = [path_of(names) for names, _ in named_leaves(self.grads)]
        gradients = {path: float(x) / max(float(size), least) for path, x, size in zip(paths, far, sizes, strict=True)}
        one, two = float(self.loss), float(loss)
        return LossDifference(abs(two - one) / (abs(one) or 1.0), gradients, two / one if one else math.nan)

    def _tolerance(self, differences: Mapping[str, LossDifference]) -> float:
        """The largest difference that rounding explains: at least that of another row order, unless it is large."""
        rounding = 0.3 * math.sqrt(_coarsest_rounding(self.program.jaxpr, platforms.of(self.options.setup.mesh)))
        seen = differences.get(_WITHIN)
        far = 0.0 if seen is None else max(or_inf(seen.loss), or_inf(seen.worst[1]))
        return max(rounding, 10 * far) if far <= 30 * rounding else rounding

    def _is_random(self, tolerance: float) -> bool:
        """Whether the loss differs if its keys are not folded, so that it draws random numbers."""
        if not {"key", "raw key"} & set(self.program.roles):
            return False
        other = self._difference(*self._of(dataclasses.replace(self.options, fold_keys=False), self.batch))
        return other.exceeds(tolerance)

    # One device.

    def _alone(self) -> tuple[jax.Array, Tree]:
        if len(processes_of(self.options.setup.mesh)) > 1:
            raise _NotCompared("the mesh has devices of several processes")
        options = dataclasses.replace(self.options, setup=_on_one_device(self.options.setup), microbatches=1)
        function, mesh = LossFunction(options), check_has_devices("check", options.setup.mesh)
        needed = 3 * _num_bytes(self.params) + _num_bytes(self.batch)
        free = _free_bytes(mesh)
        if needed > free:
            raise _NotCompared(f"it would need at least {needed} bytes, and {free} are free")
        try:
            value, grads = function(self.params, self.batch, *jax.device_get(self.args))
        except Exception as error:
            raise _NotCompared(f"the loss fails there: {str(error).splitlines()[0]:.200}") from error
        return (value[0] if options.has_aux else value), grads


class _NotCompared(Exception):
    """The loss was not compared with one device; the message says why."""


def _on_one_device(setup: Setup) -> Setup:
    mesh = check_has_devices("check", setup.mesh)
    one = np.asarray(mesh.devices).reshape(-1)[:1].reshape((1,) * mesh.devices.ndim)
    config = Config("ddp", data_axes=setup.config.data_axes, reduce_dtype=setup.config.reduce_dtype)
    config = dataclasses.replace(config, frozen=setup.config.frozen)
    return Setup(setup.inner, Mesh(one, mesh.axis_names, axis_types=mesh.axis_types), config)


def _free_bytes(mesh: Mesh) -> int:
    stats = mesh.devices.flat[0].memory_stats() or {}
    return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else _UNKNOWN_BYTES


def _num_bytes(tree: Tree) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _dealt(batch: Tree, parts: int, group: int, way: str) -> Tree:
    """The rows of each part reversed; or distributed one by one over all parts; or each part with the next.

    Each `group` of neighbouring rows stays together.
    """

    def distributed(x: jax.Array) -> jax.Array:
        cut = x.reshape(parts, x.shape[0] // parts // group, group, *x.shape[1:])
        if way == _TWICE:
            return jnp.concatenate([cut, jnp.roll(cut, -1, axis=0)], axis=1).reshape(-1, *x.shape[1:])
        if way == _WITHIN:
            return cut[:, ::-1].reshape(x.shape)
        return (cut[::-1] if cut.shape[1] == 1 else cut.swapaxes(0, 1)).reshape(x.shape)

    return jax.tree.map(distributed, batch)


def _norms(tree: Tree, other: Tree) -> tuple[list[jax.Array], list[jax.Array]]:
    """(the norm of the difference, the norm) of each leaf."""

    def norm(x: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.sum(jnp.square(jnp.abs(x.astype(sum_dtype(x))))))

    pairs = list(zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True))
    return [norm(b.astype(sum_dtype(a)) - a) for a, b in pairs], [norm(a) for a, _ in pairs]


def _coarsest_rounding(jaxpr: Jaxpr, platform: Platform) -> float:
    """The largest rounding error of the dtypes that a program computes in, and that its gradients have."""
    values = [*open_jaxpr(jaxpr).invars, *(v for eqn in equations(jaxpr) for v in eqn.outvars)]
    dtypes = {v.aval.dtype for v in values if hasattr(v.aval, "dtype")}
    floating = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
    return max(float(jnp.finfo(dtype).eps) for dtype in [*floating, *platform.product_dtypes])


def _causes(
    wrong: Sequence[str],
    differences: Mapping[str, LossDifference],
    tolerance: float,
    problem: str,
    is_random: bool,
    has_parts: bool,
) -> tuple[str, ...]:
    """The likely causes, the likeliest first."""
    found: list[str] = []
    if not all(math.isfinite(each.loss) for each in differences.values()):
        found.append("the loss is not finite: check the batch and the params first")
    if is_random:
        found.append(
            "the loss draws random numbers, which differ for each distribution of rows: turn dropout off to check"
        )
    if problem:
        return (*found, problem)
    if any(name in wrong and _doubles(differences[name]) for name in (_PARTS, _TWICE)):
        found.append("it is a sum over rows, or divided by a fixed number of rows: return the mean, or weighted=True")
    elif _WITHIN in wrong:
        found.append("a row's position in the batch matters: put what differs from row to row into the batch as a leaf")
    elif wrong == [_ALONE]:
        found.append(
            "the loss takes parts of rows for complete ones; or the batch is in zigzag order, which one device takes "
            'for the usual one: check with order="contiguous"'
            if has_parts
            else "the loss uses the number of devices, or has a collective that counts rows twice"
        )
    elif all(each.loss <= tolerance for each in differences.values()):
        found.append("only gradients differ: check stop_gradient and custom derivatives")
    return tuple(
        found or ["a row's term depends on other rows: for example a BatchNorm without axis_name=, or compared rows"]
    )


def _doubles(difference: LossDifference) -> bool:
    return any(abs(difference.factor / factor - 1) < 1e-3 for factor in (0.5, 2))
