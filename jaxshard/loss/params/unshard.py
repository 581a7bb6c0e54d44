"""`unshard` and `lookup`, marks in a loss where parameters are needed; and the parameters that reach them.

The loss is traced once with whole, abstract parameters, so it sees the shapes, sizes and structure of one device.
`unshard` marks each leaf. A leaf is lazy if only marks use it, directly or inside `scan`, `jit` and `jax.checkpoint`
(see `loss.params.uses`). The traced program then runs with the leaf's shard in its place, and gathers it at the mark
(see `loss.evaluation`). Any other leaf is gathered where the loss first uses it.
"""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxshard import collectives
from jaxshard.base.tree import is_traced
from jaxshard.base.types import Dims, DType, Equation, Names, T, Var
from jaxshard.loss.params.lookup import Lookup, exchanged, looked_up

MARK = "jaxshard.unshard"
LOOKUP_MARK = "jaxshard.lookup"


def unshard(tree: T) -> T:
    """Inside a loss function, asks for these parameters to be gathered here.

    Call it at the start of each layer, also in the body of a `lax.scan` over stacked layers. Gathers (ZeRO-3) and
    reduce-scatters of gradients (ZeRO-2, ZeRO-3) then happen layer by layer, so the full gradients never exist at once.
    Put it inside `jax.checkpoint`, so that the backward pass gathers again instead of keeping every layer.

    A leaf is gathered here only if *every* use of it passes through `unshard` first; any other leaf is gathered at its
    first use, and stays gathered. Results are the same either way. Outside `value_and_grad` and `evaluate` it is the
    identity.

    Args:
      tree: any part of the parameters, or a slice of stacked ones, as passed to the loss function.

    Returns:
      The same tree.

    >>> import jax.numpy as jnp
    >>> unshard({"w": jnp.ones(2)})
    {'w': Array([1., 1.], dtype=float32)}
    """
    return jax.tree.map(lambda x: checkpoint_name(x, MARK) if is_traced(x) else x, tree)


def lookup(table: jax.Array, ids: jax.typing.ArrayLike | Sequence[int]) -> jax.Array:
    """Inside a loss function, the rows of a table that `ids` name: `table[ids]`, an embedding.

    If the data axes shard the table, devices exchange these rows, and in the backward pass their gradients, instead of
    gathering the table and scattering its gradient; no device then holds more than its shard of the gradient.
    `table[ids]` does the same if that moves less than half of the bytes, as for most vocabularies; `lookup` always
    does. A table sharded along its features sends the fewest bytes, and one sharded along its rows N times as many on N
    devices. Results never depend on it. Outside `value_and_grad` and `evaluate` it is `table[ids]`.

    Args:
      table: (V, ..., D), a parameter as passed to the loss function, or cast to another dtype.
      ids: integers, an array of any shape or a list.

    Returns:
      `(*ids.shape, ..., D)`, in the table's dtype.

    Raises:
      TypeError: `ids` are not integers, or the table has no rows.

    >>> import jax.numpy as jnp
    >>> lookup(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([1])).tolist()
    [[3.0, 4.0]]
    """
    if not getattr(table, "ndim", 0):
        raise TypeError(
            f"lookup: the table must be one array of (V, ..., D), got a {type(table).__name__}"
            f"{' without dims' if hasattr(table, 'shape') else ''}"
        )
    rows = ids if isinstance(ids, jax.Array) else np.asarray(ids)
    if not jnp.issubdtype(rows.dtype, jnp.integer):
        raise TypeError(
            f"lookup: ids must be integers, an array or a list of them, got {rows.dtype} ({type(ids).__name__}); for "
            "slices and masks use table[...]"
        )
    return (checkpoint_name(table, LOOKUP_MARK) if is_traced(table) else jnp.asarray(table))[rows]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sharded:
    """One parameter inside the loss, in one of four forms.

    * a shard, cut by `held`, which `whole()` gathers (ZeRO-3);
    * a whole copy, whose gradient is reduce-scattered (ZeRO-2);
    * a whole copy, whose gradient is all-reduced over `sum_axes` (DDP);
    * a parameter whose gradient is not reduced here: `local` is None.

    The loss is differentiated with respect to `stand_in`, a gradient slot, not `local`. `dims` cut the gradient.

    Attributes:
      computed_in: the dtype to which every use casts it, if there is one: so cast, it is gathered.
      reduced_in: the dtype in which its gradient is reduced; None: that of `stand_in`.
      casts: the dtypes that the loss has cast it to so far, in order.
    """

    local: jax.Array | None  # None: nothing is cut, and `stand_in` is the parameter itself
    stand_in: jax.Array | None  # None: no gradient is needed
    dims: Dims = dataclasses.field(metadata={"static": True})
    held: Dims = dataclasses.field(metadata={"static": True})
    sum_axes: Names = dataclasses.field(default=(), metadata={"static": True})
    computed_in: DType | None = dataclasses.field(default=None, metadata={"static": True})
    reduced_in: DType | None = dataclasses.field(default=None, metadata={"static": True})
    casts: tuple[DType, ...] = dataclasses.field(default=(), metadata={"static": True})

    def with_stand_in(self, stand_in: jax.Array) -> "Sharded":
        """The same parameter with another gradient slot."""
        return dataclasses.replace(self, stand_in=stand_in)

    def without_slot(self) -> Self:
        """The same parameter without its gradient slot."""
        return dataclasses.replace(self, stand_in=None)

    def cast_later(self) -> "Sharded":
        """The same parameter, bit for bit, disguised so that XLA for TPU casts a stack of layers only inside its loop.

        XLA moves casts past barriers and selects, but not past the addition of an unknown number.
        """
        x = self.local
        if x is None or x.ndim < 2 or x.dtype != jnp.float32:
            return self
        return dataclasses.replace(self, local=x + lax.optimization_barrier(jnp.full((), -0.0, x.dtype)))

    def whole(self) -> jax.Array:
        """The whole parameter, gathered here if it is a shard."""
        return self.cast(self.gathered())

    def gathered(self) -> jax.Array:
        """The whole parameter, not yet cast but for the gather."""
        if self.local is None:
            return collectives.whole_with_grad_apart(self._stand_in)
        local = self._narrow(self.local)
        if self.stand_in is None:
            return collectives.gather(local, self.held)
        if self.sum_axes:
            return collectives.whole_with_summed_grad(local, self._stand_in, self.sum_axes)
        return collectives.whole_with_scattered_grad(local, self._stand_in, self.dims, self.held)

    @property
    def _stand_in(self) -> jax.Array:
        assert self.stand_in is not None
        return self.stand_in if self.reduced_in is None else self.stand_in.astype(self.reduced_in)

    def _narrow(self, x: jax.Array) -> jax.Array:
        return x if self.computed_in is None else x.astype(self.computed_in)

    @property
    def dtype(self) -> DType:
        """The dtype of the parameter in the loss, before it is cast."""
        x = self.stand_in if self.local is None else self.local
        assert x is not None
        return x.dtype

    def cast(self, x: jax.Array) -> jax.Array:
        """`x`, which may have been cast for a gather, in the dtype to which the loss has cast the parameter so far."""
        return functools.reduce(lambda x, dtype: x.astype(dtype), (self.dtype, *self.casts), x)

    def as_dtype(self, dtype: DType) -> Self:
        """The same parameter, cast."""
        return dataclasses.replace(self, casts=(*self.casts, dtype))

    def rows(self, ids: jax.Array, how: Lookup) -> jax.Array:
        """Of a table, the rows of these ids, exchanged with other devices."""
        assert self.local is not None
        local = self.cast(self._narrow(self.local))
        if self.stand_in is None:
            return exchanged(local, ids, how, self.dims, bool(self.held))
        return looked_up(local, self.stand_in, ids, how, self.dims, bool(self.held))

    @property
    def looked_up_by(self) -> Dims:
        """How a table is cut for lookups that exchange rows; () if they cannot."""
        return lookup_dims(self.dims, self.held)


def lookup_dims(dims: Dims, held: Dims) -> Dims:
    """How a table is cut for lookups that exchange rows: like its gradient, if the table is whole or cut so, too."""
    return dims if held in ((), dims) else ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AtFirstUse:
    """A cut parameter that is gathered at its first use in the loss, unless that is a lookup that exchanges rows.

    Attributes:
      asked: `lookup` asks for exchanged rows, whatever they cost.
    """

    sharded: Sharded
    asked: bool = dataclasses.field(default=False, metadata={"static": True})

    def whole(self) -> jax.Array:
        """The whole parameter, gathered here."""
        return self.sharded.whole()

    def after(self, mark: str) -> "AtFirstUse":
        """The same parameter after a mark."""
        return dataclasses.replace(self, asked=True) if mark == LOOKUP_MARK else self

    def as_dtype(self, dtype: DType) -> "AtFirstUse":
        """The same parameter, cast."""
        return dataclasses.replace(self, sharded=self.sharded.as_dtype(dtype))

    def with_stand_in(self, stand_in: jax.Array) -> "AtFirstUse":
        """The same parameter with another gradient slot."""
        return dataclasses.replace(self, sharded=self.sharded.with_stand_in(stand_in))

    def rows(self, ids: jax.Array, eqn: Equation) -> jax.Array:
        """The rows that a gather looks up, exchanged with other devices."""
        return self.sharded.rows(ids, Lookup.of(eqn))


Value: TypeAlias = jax.Array | Sharded | AtFirstUse
Environment: TypeAlias = dict[Var, Value]
Scale: TypeAlias = jax.Array | None


def at_the_start(x: Value) -> jax.Array:
    """The whole parameter, gathered now, before the loss runs."""
    if isinstance(x, jax.Array):
        return x
    return x.stand_in if isinstance(x, Sharded) and x.local is None and x.stand_in is not None else x.whole()


def without_gradient(x: Value) -> jax.Array:
    """As `at_the_start`, if no gradient is needed: less to trace."""
    if isinstance(x, Sharded) and x.local is not None:
        return dataclasses.replace(x, stand_in=None).whole()
    return at_the_start(x)


@dataclasses.dataclass(frozen=True, eq=False)
class Deferred:
    """A sub-program with its own backward schedule (1F1B), which runs later, with `Sharded` as some of its inputs.

    In the traced program it is a jitted call, identified by its name. (As the policy of a `jax.checkpoint` it would
    need no name, but on jax 0.12 the gradients of a pipeline in float64 were then off by 1e-8.)
    """

    run: Callable[[Sequence[Value]], list[Value]]
    """Flat outputs of flat inputs."""
    why_not_lazy: Callable[[int, int, Dims, bool], str | None]
    """As `uses.why_not_lazy`, for (the input's position, its number of dims, how it is cut, whether it is cast)."""
    casts_to: Callable[[int], Iterator[DType | None]]
    """As `uses.casts_to`, for the input's position."""

    def bind(self, values: Sequence[Value]) -> list[Value]:
        """Calls `run` in a trace, so that `deferred` can find it."""

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
    """While the loss is traced, sets the scale that multiplies its backward pass (`LossScale`), or None."""
    token = _scale.set(scale)
    try:
        yield
    finally:
        _scale.reset(token)


def loss_scale() -> Scale:
    """The scale that `scaled_by` set, for parts of the loss with their own backward pass."""
    return _scale.get()


_scale: contextvars.ContextVar[Scale] = contextvars.ContextVar("loss_scale", default=None)


def deferred(eqn: Equation) -> Deferred | None:
    """The deferred part of the loss that a call runs, if `Deferred.bind` made the call."""
    name = eqn.params.get("name")
    return _known.get(name) if isinstance(name, str) and name.startswith(_DEFERRED) else None
