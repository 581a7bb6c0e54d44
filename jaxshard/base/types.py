"""The types that signatures name: trees, meshes, dtypes, traced programs.

`Params`, `State`, `Batch` and `T` are type variables: what returns one returns the caller's own type. `Tree` is any
pytree whose leaves are arrays or shapes, of which a function knows nothing more.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh

if TYPE_CHECKING:  # importing it takes 70 ms
    from jax.extend import core

T = TypeVar("T")
Params = TypeVar("Params")
State = TypeVar("State")
Batch = TypeVar("Batch")

Tree: TypeAlias = Any
Metrics: TypeAlias = dict[str, Any]
AnyMesh: TypeAlias = Mesh | AbstractMesh
DType: TypeAlias = jax.typing.DTypeLike
AxisSizes: TypeAlias = Mapping[str, int]

Jaxpr: TypeAlias = "core.Jaxpr | core.ClosedJaxpr"
Equation: TypeAlias = "core.JaxprEqn"
Var: TypeAlias = "core.Var | core.Literal"
