"""`unshard`: which parameters are gathered where the loss needs them, and which at the start.

The loss is traced once with whole, abstract parameters, so that whatever it reads of them (shapes, sizes, structure)
is as on one device. `unshard` leaves a mark on each leaf. A leaf that reaches marks only, through nothing but `scan`,
`jit` and `jax.checkpoint`, is lazy: the traced program is then run with the leaf's shard in its place, and gathers at
the mark.
"""

import abc
import contextlib
import contextvars
import dataclasses
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxshard.base.jaxprs import (
    INLINED,
    REMAT,
    closed_jaxpr,
    core,
    inner_jaxpr,
    is_literal,
    open_jaxpr,
    scan_split,
    unnamed,
)
from jaxshard.base.tree import is_traced
from jaxshard.core import collectives

_MARK = "jaxshard.unshard"
_CASTS = frozenset({"pvary", "pcast"})  # types alone change


def unshard(tree: Any) -> Any:
    """Inside a loss function: these parameters, whole, here.

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
    """A parameter not yet whole, or of which the gradient alone is cut, or (of no `dims`) nothing at all.

    `local` is the shard, or, unless `is_shard`, a whole copy; `stand_in` is what is differentiated by in its place.
    """

    local: jax.Array | None  # None: nothing is cut, and `stand_in` is the parameter
    stand_in: jax.Array | None  # None: nothing is differentiated with respect to it
    dims: collectives.Dims = dataclasses.field(metadata={"static": True})
    is_shard: bool = dataclasses.field(metadata={"static": True})

    def whole(self) -> jax.Array:
        if self.local is None:
            return collectives.whole_with_grad_apart(self.stand_in)
        if self.stand_in is None:
            return collectives.gather(self.local, self.dims) if self.is_shard else self.local
        return collectives.whole_with_scattered_grad(self.local, self.stand_in, self.dims, self.is_shard)


class Deferred(abc.ABC):
    """A part of the loss that can run again, later, with `Sharded` in place of some of its inputs."""

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """`run`, in a trace, where `deferred` finds it again."""

        def named(*values: Any) -> list[Any]:
            return self.run(values)

        named.__name__ = f"{_DEFERRED}{next(_numbers)}"
        _known[named.__name__] = self
        return jax.jit(named)(*values)

    @abc.abstractmethod
    def why_not_lazy(self, position: int, ndim: int, dims: collectives.Dims) -> str | None:
        """As the function: of input `position`, of so many dims."""

    @abc.abstractmethod
    def run(self, values: Sequence[Any]) -> list[Any]:
        """Flat outputs of flat inputs."""


@contextlib.contextmanager
def scaled_by(scale: Any) -> Iterator[None]:
    """While the loss is traced: what its backward pass will be multiplied by (`LossScale`), or None."""
    token = _scale.set(scale)
    try:
        yield
    finally:
        _scale.reset(token)


def loss_scale() -> Any:
    """For parts of the loss that start a backward pass of their own."""
    return _scale.get()


_scale: contextvars.ContextVar[Any] = contextvars.ContextVar("loss_scale", default=None)
_DEFERRED = "jaxshard_deferred_"
_numbers = itertools.count()
_known: weakref.WeakValueDictionary[str, Deferred] = weakref.WeakValueDictionary()


def _deferred(eqn: Any) -> Deferred | None:
    name = eqn.params.get("name")
    return _known.get(name) if isinstance(name, str) and name.startswith(_DEFERRED) else None


def why_not_lazy(jaxpr: Any, index: int, dims: collectives.Dims) -> str | None:
    """None if input `index` of the traced loss reaches marks only, else the first use that is no mark."""
    jaxpr = open_jaxpr(jaxpr)
    return _why_not_lazy(jaxpr, jaxpr.invars[index], dims)


def _why_not_lazy(jaxpr: Any, var: Any, dims: collectives.Dims) -> str | None:
    if any(out is var for out in jaxpr.outvars):
        return "returned or carried through a scan"
    for eqn in jaxpr.eqns:
        for position, operand in enumerate(eqn.invars):
            if operand is var and (reason := _other_use(jaxpr, eqn, position, dims)):
                return reason
    return None


def _other_use(jaxpr: Any, eqn: Any, position: int, dims: collectives.Dims) -> str | None:
    name = eqn.primitive.name
    if name == "name" and eqn.params["name"] == _MARK:
        return None
    if (part := _deferred(eqn)) is not None:
        return part.why_not_lazy(position, eqn.invars[position].aval.ndim, dims)
    if name in _CASTS:
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


def run(closed: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluates a traced program, of whose inputs some are `Sharded`, gathering those at their marks."""
    jaxpr = open_jaxpr(closed)
    if not any(isinstance(value, Sharded) for value in values):
        return list(core().jaxpr_as_fun(closed_jaxpr(closed))(*values))
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True))
    env |= dict(zip(jaxpr.invars, values, strict=True))
    plain: list[Any] = []  # equations since the last one that met a Sharded
    for eqn in jaxpr.eqns:
        operands = [None if is_literal(v) else env.get(v) for v in eqn.invars]
        if any(isinstance(value, Sharded) for value in operands):
            _run_plain(jaxpr, plain, env)
            plain = []
            outs = _run_sharded(eqn, [_read(env, v) for v in eqn.invars])
            env |= dict(zip(eqn.outvars, outs, strict=True))
        else:
            plain.append(eqn)
    _run_plain(jaxpr, plain, env)
    return [_read(env, v) for v in jaxpr.outvars]


def _run_plain(jaxpr: Any, eqns: list[Any], env: dict[Any, Any]) -> None:
    """Runs equations that no Sharded enters, as one piece, so that JAX's own evaluation keeps names and contexts."""
    if not eqns:
        return
    outs = [v for eqn in eqns for v in eqn.outvars if not isinstance(v, core().DropVar)]
    own = set(outs)
    ins = list(dict.fromkeys(v for e in eqns for v in e.invars if not is_literal(v) and v not in own))
    piece = jaxpr.replace(
        constvars=[], invars=ins, outvars=outs, eqns=eqns, debug_info=unnamed(jaxpr, len(ins), len(outs))
    )
    results = core().jaxpr_as_fun(core().ClosedJaxpr(piece, ()))(*(env[v] for v in ins))
    env |= dict(zip(outs, results, strict=True))


def _run_sharded(eqn: Any, values: list[Any]) -> list[Any]:
    name = eqn.primitive.name
    if name == "name":
        return [checkpoint_name(values[0].whole(), _MARK)]
    if (part := _deferred(eqn)) is not None:
        return part.run(values)
    if name in _CASTS:
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


def _run_scan(eqn: Any, values: list[Any]) -> list[Any]:
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


def _read(env: dict[Any, Any], v: Any) -> Any:
    return v.val if is_literal(v) else env[v]
