"""The types that signatures name: trees, meshes, dtypes, traced programs.

`Params`, `State`, `Batch` and `T` are type variables: a function that takes one and returns it keeps the caller's own
type. `Tree` is any pytree whose leaves are arrays or shapes, for functions that know nothing more about it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NotRequired, Protocol, TypeAlias, TypedDict, TypeVar, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

T = TypeVar("T")
Params = TypeVar("Params")
State = TypeVar("State")
Batch = TypeVar("Batch")

Tree: TypeAlias = Any
TreeDef: TypeAlias = Any  # `jax.tree.structure` of a tree
AnyMesh: TypeAlias = Mesh | AbstractMesh
REPLICA_AXIS = "replica"  # the mesh axis that copies of the params and state lie along
DType: TypeAlias = jax.typing.DTypeLike
Scalar: TypeAlias = jax.Array | int | bool  # a number, traced or not
AxisSizes: TypeAlias = Mapping[str, int]


class Metrics(TypedDict):
    """The metrics that a training step returns; scalars, the same on all devices."""

    loss: jax.Array
    """Of the whole batch, before the step."""

    grad_norm: jax.Array
    """Of the whole averaged gradient."""

    skipped: jax.Array
    """Whether params and state stayed as they were, bit for bit."""

    bad_leaf: jax.Array
    """The index, in `jax.tree.leaves((params, state))` without frozen params, of the first leaf whose gradient or new
    value is not finite; -1 if all are finite."""

    loss_scale: NotRequired[jax.Array]
    """The scale of this step, if the optimizer uses loss scaling."""

    aux: NotRequired[Any]
    """With `has_aux`, the loss's auxiliary output, as `value_and_grad` returns it."""


def is_whole(value: object, least: int) -> bool:
    """Whether `value` is a Python or NumPy integer, `least` or more; booleans are not integers here."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and cast(int, value) >= least


# Traced programs: the attributes that we read, without importing `jax.extend.core` (70 ms).


class Var(Protocol):
    """A variable of a traced program, or a literal."""

    aval: Any
    val: Any  # only a literal has it


class Primitive(Protocol):
    """An operation, by name."""

    name: str
    bind: Any
    multiple_results: bool
    get_bind_params: Any


class Equation(Protocol):
    """One operation of a traced program."""

    primitive: Primitive
    replace: Any
    invars: list[Var]
    outvars: list[Var]
    params: dict[str, Any]
    effects: Iterable[object]
    source_info: Any


class OpenJaxpr(Protocol):
    """A traced program, as `jaxshard.programs.jaxprs.open_jaxpr` gives it."""

    invars: list[Var]
    outvars: list[Var]
    constvars: list[Var]
    eqns: list[Equation]
    debug_info: Any

    def replace(self, **changes: object) -> "OpenJaxpr":
        """A copy of the program with these fields changed."""
        ...


Jaxpr: TypeAlias = Any
"""A traced program, open or closed: a `Jaxpr` or `ClosedJaxpr` of `jax.extend.core`."""
