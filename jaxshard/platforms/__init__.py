"""Code for one platform's compiler: XLA for CPU, GPU and TPU."""

import contextlib
import contextvars
from collections.abc import Iterator

from jax.sharding import AbstractMesh, Mesh

from jaxshard.mesh import platform_here, platform_of
from jaxshard.platforms.cpu import CPU
from jaxshard.platforms.gpu import GPU
from jaxshard.platforms.platform import Platform
from jaxshard.platforms.tpu import TPU

OURS = tuple(option for platform in (CPU, GPU, TPU) for option in platform.compiler_options)
"""All options for XLA that jaxshard sets."""
_ALL = {platform.name: platform for platform in (CPU, GPU, TPU)}


def named(name: str) -> Platform:
    """The platform of that name; an unknown one gets only the cut order of TPU and CPU."""
    return _ALL.get(name) or Platform(name, TPU.rank_of_cut, TPU.tile)


def of(mesh: Mesh | AbstractMesh) -> Platform:
    """The platform of a mesh."""
    return named(platform_of(mesh))


def here() -> Platform:
    """The platform of the mesh in whose `shard_map` this is traced, or of `on`."""
    return named(_on.get() or platform_here())


@contextlib.contextmanager
def on(mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """Within it, what is traced runs on this mesh: for programs that XLA partitions, which have no `shard_map`."""
    token = _on.set(platform_of(mesh))
    try:
        yield
    finally:
        _on.reset(token)


_on: contextvars.ContextVar[str] = contextvars.ContextVar("on", default="")
