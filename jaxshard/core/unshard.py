"""`unshard` decides which parameters are gathered where the loss needs them, and which at the start.

The loss is traced once with whole, abstract parameters, so that it sees the shapes, sizes and structure of one device.
`unshard` leaves a mark on each leaf. A leaf is lazy if it goes to marks alone, through nothing but `scan`, `jit` and
`jax.checkpoint`. The traced program then runs with the leaf's shard in its place, and gathers it at the mark.
"""

import contextlib
import contextvars
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxshard.base.axes import Dims
from jaxshard.base.jaxprs import closed_jaxpr, core, inner_jaxpr, is_literal, open_jaxpr, run_equations, scan_split
from jaxshard.base.primitives import CASTS, INLINED, REMAT
from jaxshard.base.tree import is_traced
from jaxshard.base.types import Equation, Jaxpr, OpenJaxpr, T, Tree, Var
from jaxshard.core import collectives

_MARK = "jaxshard.unshard"


def unshard(tree: T) -> T:
    """Inside a loss function, asks for these parameters to be gathered here.

    Called at the start of each layer, also in the body of a `lax.scan` over stacked layers, it makes gathers (ZeRO-3)
    and reduce-scatters of gradients (ZeRO-2, ZeRO-3) happen layer by layer, so that whole gradients never exist. Put
    it inside `jax.checkpoint`, so that the backward pass gathers again instead of keeping every layer.

    A leaf is gathered here only if *every* use of it passes through `unshard` first; any other leaf arrives whole
    anyway. So results never depend on it. Outside of `value_and_grad` and `evaluate` it is the identity.

    Args:
      tree: any part of the parameters, or a slice of stacked ones, as the loss function got it.

    Returns:
      The same tree.

    >>> import jax.numpy as jnp
    >>> unshard({"w": jnp.ones(2)})
    {'w': Array([1., 1.], dtype=float32)}
    """
    return jax.tree.map(lambda x: checkpoint_name(x, _MARK) if is_traced(x) else x, tree)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sharded:
    """One parameter inside the loss, in one of three forms.

    * a shard, which `whole()` gathers (ZeRO-3): `is_shard`;
    * a whole copy, whose gradient is reduce-scattered (ZeRO-2);
    * a parameter that is not cut: `local` is None.

    The loss is differentiated by `stand_in` in place of `local`.
    """

    local: jax.Array | None  # None: nothing is cut, and `stand_in` is the parameter
    stand_in: jax.Array | None  # None: nothing is differentiated with respect to it
    dims: Dims = dataclasses.field(metadata={"static": True})
    is_shard: bool = dataclasses.field(metadata={"static": True})

    def whole(self) -> jax.Array:
        """The whole parameter, gathered here if it is a shard."""
        if self.local is None:
            assert self.stand_in is not None
            return collectives.whole_with_grad_apart(self.stand_in)
        if self.stand_in is None:
            return collectives.gather(self.local, self.dims) if self.is_shard else self.local
        return collectives.whole_with_scattered_grad(self.local, self.stand_in, self.dims, self.is_shard)


Value: TypeAlias = jax.Array | Sharded
Environment: TypeAlias = dict[Var, Value]
Scale: TypeAlias = jax.Array | None


@dataclasses.dataclass(frozen=True, eq=False)
class Deferred:
    """A part of the loss that can run again, later, with `Sharded` in place of some of its inputs.

    In the traced program it is a jitted call, found again by its name. (As the policy of a `jax.checkpoint` it would
    need no names, but on jax 0.12 the gradients of a pipeline in float64 were then off by 1e-8.)
    """

    run: Callable[[Sequence[Value]], list[Value]]
    """Flat outputs of flat inputs."""
    why_not_lazy: Callable[[int, int, Dims], str | None]
    """As the function of that name: of the input at a position, its number of dims, how it is cut."""

    def bind(self, values: Sequence[Value]) -> list[Value]:
        """`run`, in a trace, where `_deferred` finds it again."""

        def named(*values: Value) -> list[Value]:
            return self.run(values)

        named.__name__ = f"{_DEFERRED}{next(_numbers)}"
        _known[named.__name__] = self
        return jax.jit(named)(*values)


_DEFERRED = "jaxshard_deferred_"
_numbers = itertools.count()
_known: weakref.WeakValueDictionary[str, Deferred] = weakref.WeakValueDictionary()


@contextlib.contextmanager
def scaled_by(scale: Scale) -> Iterator[None]:
    """Sets, while the loss is traced, the scale that multiplies its backward pass (`LossScale`), or None."""
    token = _scale.set(scale)
    try:
        yield
    finally:
        _scale.reset(token)


def loss_scale() -> Scale:
    """The scale that `scaled_by` set, for parts of the loss that run a backward pass of their own."""
    return _scale.get()


_scale: contextvars.ContextVar[Scale] = contextvars.ContextVar("loss_scale", default=None)


def _deferred(eqn: Equation) -> Deferred | None:
    name = eqn.params.get("name")
    return _known.get(name) if isinstance(name, str) and name.startswith(_DEFERRED) else None


def why_not_lazy(jaxpr: Jaxpr, index: int, dims: Dims) -> str | None:
    """None if input `index` of the traced loss goes to marks alone, else its first other use, in words."""
    opened = open_jaxpr(jaxpr)
    return _why_not_lazy(opened, opened.invars[index], dims)


def _why_not_lazy(jaxpr: OpenJaxpr, var: Var, dims: Dims) -> str | None:
    if any(out is var for out in jaxpr.outvars):
        return "returned or carried through a scan"
    for eqn in jaxpr.eqns:
        for position, operand in enumerate(eqn.invars):
            if operand is var and (reason := _other_use(jaxpr, eqn, position, dims)):
                return reason
    return None


def _other_use(jaxpr: OpenJaxpr, eqn: Equation, position: int, dims: Dims) -> str | None:
    name = eqn.primitive.name
    if name == "name" and eqn.params["name"] == _MARK:
        return None
    if (part := _deferred(eqn)) is not None:
        return part.why_not_lazy(position, eqn.invars[position].aval.ndim, dims)
    if name in CASTS:
        return _why_not_lazy(jaxpr, eqn.outvars[0], dims)
    if name in INLINED or name in REMAT:
        return why_not_lazy(inner_jaxpr(eqn), position, dims)
    if name != "scan":
        return f"used by {name}"
    num_consts, num_carry = scan_split(eqn)
    if num_consts <= position < num_consts + num_carry:
        return "carried through a scan"
    if position >= num_consts and any(-dim == eqn.invars[position].aval.ndim for dim, _ in dims):
        return "cut on the dim that a scan runs over"
    return why_not_lazy(inner_jaxpr(eqn), position, dims)


def run(closed: Jaxpr, values: Sequence[Tree]) -> list[Value]:
    """Evaluates a traced program; inputs that are `Sharded` are gathered at their marks."""
    jaxpr = open_jaxpr(closed)
    if not any(isinstance(value, Sharded) for value in values):
        return list(core().jaxpr_as_fun(closed_jaxpr(closed))(*values))
    env: Environment = dict(zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True))
    env |= dict(zip(jaxpr.invars, values, strict=True))
    plain: list[Equation] = []  # equations since the last one with a Sharded operand
    for eqn in jaxpr.eqns:
        operands = [None if is_literal(v) else env.get(v) for v in eqn.invars]
        if any(isinstance(value, Sharded) for value in operands):
            run_equations(jaxpr, plain, env)
            plain = []
            outs = _run_sharded(eqn, [_read(env, v) for v in eqn.invars])
            env |= dict(zip(eqn.outvars, outs, strict=True))
        else:
            plain.append(eqn)
    run_equations(jaxpr, plain, env)
    return [_read(env, v) for v in jaxpr.outvars]


def _run_sharded(eqn: Equation, values: list[Value]) -> list[Value]:
    name = eqn.primitive.name
    if name == "name":
        (value,) = values
        assert isinstance(value, Sharded)
        return [checkpoint_name(value.whole(), _MARK)]
    if (part := _deferred(eqn)) is not None:
        return part.run(values)
    if name in CASTS:
        return [jax.tree.map(lambda x: collectives.vary(x, eqn.params["axes"]), values[0])]
    if name == "scan":
        return _run_scan(eqn, values)
    if name in REMAT:
        again = jax.checkpoint(
            lambda *inner: run(inner_jaxpr(eqn), inner),
            policy=eqn.params["policy"],
            prevent_cse=eqn.params["prevent_cse"],
        )
        return again(*values)
    assert name in INLINED, name
    return run(inner_jaxpr(eqn), values)


def _run_scan(eqn: Equation, values: list[Value]) -> list[Value]:
    num_consts, num_carry = scan_split(eqn)
    consts = values[:num_consts]

    def body(carry, xs):
        outs = run(inner_jaxpr(eqn), [*consts, *carry, *xs])
        return outs[:num_carry], outs[num_carry:]

    carry, stacked = lax.scan(
        body,
        values[num_consts : num_consts + num_carry],
        values[num_consts + num_carry :],
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*carry, *stacked]


def _read(env: Environment, v: Var) -> Value:
    return v.val if is_literal(v) else env[v]
