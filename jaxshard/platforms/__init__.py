"""What the compilers of one platform want: XLA for CPU, GPU and TPU."""

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
    """The platform of the mesh in whose `shard_map` this is traced."""
    return named(platform_here())
