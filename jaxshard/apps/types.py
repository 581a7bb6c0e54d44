"""Types that signatures of the applications name."""

from typing import Any, TypeAlias, TypeVar

from jax.sharding import AbstractMesh, Mesh

T = TypeVar("T")
Tree: TypeAlias = Any  # any pytree of arrays or shapes
AnyMesh: TypeAlias = Mesh | AbstractMesh
