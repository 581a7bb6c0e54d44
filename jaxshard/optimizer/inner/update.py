"""Calls the inner optimizer's `update` as plain optax does; and traces its init and update on shapes, for analyses."""

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.errors import JAXIndexError, JAXTypeError

from jaxshard.base.tree import (
    Names,
    by_shapes,
    check_same_structure,
    have_same_shapes,
    is_key,
    is_traced,
    named_leaves,
    path_of,
    structure,
)
from jaxshard.base.types import Jaxpr, Tree
from jaxshard.optimizer.inner.whole_operands import fragile
from jaxshard.programs.questions import depends

PART = "the update"  # in a step, for `programs.source`

Update: TypeAlias = Callable[
    [optax.GradientTransformation, Tree, Tree, Tree, Mapping[str, Tree]], tuple[Tree, Tree]
]  # like `update`: (inner, gradients, state, params, further arguments) -> (updates, state)

_OFFERED = ("value", "grad")  # `train_step` passes these to every optimizer that accepts them


def fast(tree: Tree) -> Tree:
    """The params that the loss uses: the fast ones of `optax.LookaheadParams`, else all."""
    return tree.fast if isinstance(tree, optax.LookaheadParams) else tree


def with_fast(tree: Tree, of_fast: Tree) -> Tree:
    """The inverse of `fast`: `tree` with `of_fast` as its fast part."""
    return tree._replace(fast=of_fast) if isinstance(tree, optax.LookaheadParams) else of_fast


def update(
    inner: optax.GradientTransformation, grads: Tree, state: Tree, params: Tree, extra: Mapping[str, Tree]
) -> tuple[Tree, Tree]:
    """Returns (updates, state). A transformation that refuses `value` or `grad`, like sam, is called without it.

    Raises:
      TypeError: the optimizer lacks an argument that it needs, or does not return (updates, state).
      ValueError: the updates do not fit the params.
    """
    updates, state = called(inner, grads, state, params, extra)
    return _fitting(updates, grads if params is None else params), state


def called(
    inner: optax.GradientTransformation, grads: Tree, state: Tree, params: Tree, extra: Mapping[str, Tree]
) -> tuple[Tree, Tree]:
    """As `update`, but the updates have the shapes that the optimizer gives them."""
    run = optax.with_extra_args_support(inner).update
    while True:
        try:
            result = run(fast(grads), state, params, **extra)
            break
        except TypeError as error:
            refused = [name for name in _OFFERED if f"unexpected keyword argument '{name}'" in str(error)]
            if not refused or refused[0] not in extra:
                _raise_if_missing(error)
                raise
            extra = {name: value for name, value in extra.items() if name != refused[0]}
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TypeError(f"update: the optimizer's update must return (updates, state), not {type(result).__name__}")
    return result[0], result[1]


def _fitting(updates: Tree, params: Tree) -> Tree:
    """The updates in the params' shapes; smaller ones are broadcast, as in `optax.apply_updates`.

    Raises:
      TypeError: an update is neither an array nor a number.
      ValueError: the updates and params differ in structure, or a shape cannot be broadcast.
    """
    shapes = [(names, jnp.shape(leaf)) for names, leaf in named_leaves(params)]
    if structure(updates) != structure(params):
        like = jax.tree.unflatten(structure(updates), [0] * structure(updates).num_leaves)
        check_same_structure("update: the optimizer's updates", like, jax.tree.map(lambda _: 0, params), "parameter")
        raise ValueError(
            f"update: the optimizer's updates have the structure {structure(updates)}, and the params "
            f"{structure(params)}; return updates of the params' structure"
        )
    leaves = [
        _broadcast(path_of(names), u, shape) for (names, shape), u in zip(shapes, jax.tree.leaves(updates), strict=True)
    ]
    return jax.tree.unflatten(structure(updates), leaves)


def _broadcast(path: str, update: Tree, shape: tuple[int, ...]) -> Tree:
    check_is_array(f"update: the optimizer's update of {path}", update)
    given = jnp.shape(update)
    if given == shape:
        return update
    try:
        return jnp.broadcast_to(update, shape)
    except ValueError as error:
        raise ValueError(
            f"update: the optimizer's update of {path} has shape {given}, and that parameter has {shape}; return "
            "updates of the params' shapes"
        ) from error


def check_is_array(what: str, leaf: Tree) -> None:
    """Raises a TypeError for a leaf that is neither an array of numbers (or keys) nor a number."""
    is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    if not (is_array or isinstance(leaf, bool | int | float | complex)) or (
        isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "OSUmM"
    ):
        raise TypeError(
            f"{what} is of type {type(leaf).__name__}, neither an array nor a number; keep it out of the tree: close "
            "over it, or make it static"
        )


def _raise_if_missing(error: TypeError) -> None:
    """Raises a TypeError with the cure if the error is about a missing argument, such as `value_fn`."""
    missing = re.search(r"missing \d+ required keyword-only arguments?: '(\w+)'", str(error))
    if not missing:
        return
    name = missing[1]
    value = "lambda params: loss_fn(params, batch)" if name == "value_fn" else "..."
    raise TypeError(
        f"update: the optimizer needs the argument {name!r}: give\n"
        f'train_step(loss_fn, opt, extra=lambda params, batch: {{"{name}": {value}}})\n'
        "or in a step of your own\n"
        f"opt.update(grads, state, params, value=loss, grad=grads, {name}={value})"
    ) from error


# Its init and update, traced on shapes.


class Start(NamedTuple):
    """The shapes of the state that an init makes; if it reads values of its params, `why` has JAX's message instead.

    `fragile` names the operations of the init whose operands must not be cut.
    """

    state: Tree
    why: str = ""
    fragile: frozenset[str] = frozenset()


@by_shapes
def first_state(inner: optax.GradientTransformation, params: Tree) -> Start:
    """The shapes of `inner.init(params)`, from one trace of it."""
    try:
        traced = jax.jit(lambda params: _checked(inner.init(params))).trace(params)
        return Start(traced.out_info, fragile=fragile(traced.jaxpr))
    except (JAXTypeError, JAXIndexError) as error:
        return Start(None, str(error).partition("\n")[0] or type(error).__name__)


def _checked(state: Tree) -> Tree:
    """The state unchanged; raises a TypeError for a leaf that is neither an array nor a number."""
    for names, leaf in named_leaves(state):
        check_is_array(f"init: {path_of(names)} of the optimizer's state", leaf)
    return state


def state_of_values(init: Callable[[Tree], Tree], params: Tree, why: str) -> Tree:
    """Runs an init that reads values of its params on this process's first CPU device; `why` as in `Start`.

    Raises:
      ValueError: the params have no values here: they are shapes, traced, or partly on other processes.
    """

    def on_host(path: str, x: Tree) -> Tree:
        here = isinstance(x, np.ndarray) or (isinstance(x, jax.Array) and not is_traced(x))
        if not here or not getattr(x, "is_fully_addressable", True):
            raise ValueError(
                f"init: this optimizer's init reads the values of its params, and those of {path} are not available "
                "(it is a shape, traced, or partly on other processes); call opt.init outside jit, with complete "
                f"arrays or NumPy arrays. JAX said: {why}"
            )
        return x if is_key(x) else jnp.asarray(jax.device_get(x))

    with jax.ensure_compile_time_eval(), _on_cpu():  # also within a trace
        leaves = [on_host(path_of(names), x) for names, x in named_leaves(params)]
        return jax.tree.map(jnp.asarray, init(jax.tree.unflatten(jax.tree.structure(params), leaves)))


def _on_cpu() -> AbstractContextManager[None]:
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        return nullcontext()


class Traced(NamedTuple):
    """A traced update, from (gradients, state, params) to (updates, state), and the state before and after it."""

    jaxpr: Jaxpr
    before: Tree
    after: Tree


@by_shapes
def first_update(inner: optax.GradientTransformation, params: Tree) -> Traced | None:
    """The traced first update; None if the trace fails: it needs further arguments, or the first step will raise."""
    start = first_state(inner, params)
    return None if start.why else _traced(inner, params, start.state)


@by_shapes
def _later_update(inner: optax.GradientTransformation, params_and_state: tuple[Tree, Tree]) -> Traced | None:
    return _traced(inner, *params_and_state)


def _traced(inner: optax.GradientTransformation, params: Tree, state: Tree) -> Traced | None:
    def run(grads, state, params):
        offered = {"value": jnp.zeros((), jnp.result_type(float)), "grad": grads}
        return update(inner, grads, state, params, offered)

    try:
        jaxpr, (_, after) = jax.make_jaxpr(run, return_shape=True)(fast(params), state, params)
    except Exception:  # of any type: it is the user's own code
        return None
    return Traced(jaxpr, state, after)


def update_of(inner: optax.GradientTransformation, params: Tree, state: Tree) -> Traced | None:
    """The traced update of a state (shapes); None as for `first_update`."""
    start = first_state(inner, params)
    if not start.why and have_same_shapes(start.state, state):
        return first_update(inner, params)
    return _later_update(inner, (params, state))


class Settled(NamedTuple):
    """The state after an update; in a few optimizers its leaves, shapes or dtypes differ from those before.

    `binding` names leaves that the update drops, gives another shape, or adds for later updates to read. A step that
    changes these leaves cannot be skipped.
    """

    state: Tree
    binding: list[Names]


def settled(inner: optax.GradientTransformation, params: Tree, found: Traced) -> Settled | None:
    """The state after the update `found` if its structure, shapes or dtypes change; None for nearly all optimizers."""
    if have_same_shapes(found.after, found.before):
        return None
    before, after = (dict(named_leaves(state)) for state in (found.before, found.after))
    reshaped = [names for names in before if names in after and before[names].shape != after[names].shape]
    came = [names for names in after if names not in before]
    if came and (second := update_of(inner, params, found.after)) is not None:
        came = [names for names in came if _is_read(second, params, list(after).index(names))]
    return Settled(found.after, [*(names for names in before if names not in after), *reshaped, *came])


def _is_read(traced: Traced, params: Tree, index: int) -> bool:
    """Whether any output depends on leaf `index` of the state before the update."""
    num_grads, num_params = len(jax.tree.leaves(fast(params))), len(jax.tree.leaves(params))
    which = [i == index for i in range(len(jax.tree.leaves(traced.before)))]
    return any(depends(traced.jaxpr, [*[False] * num_grads, *which, *[False] * num_params]))
