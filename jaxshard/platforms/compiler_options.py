"""XLA options: those that jaxshard sets, and those that a user adds."""

import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard import platforms
from jaxshard.mesh import platform_of
from jaxshard.platforms.platform import StepKind, Value


def ours(mesh: Mesh | AbstractMesh, step: StepKind) -> dict[str, Value]:
    """The options that jaxshard sets for a step on a mesh."""
    return dict(option.setting for option in platforms.of(mesh).compiler_options if option.applies(step))


def check_given(who: str, given: Mapping[str, Value] | None) -> dict[str, Value]:
    """The user's options as a dict.

    Raises:
      TypeError: they are not a mapping of names to strings, numbers and bools.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f'{who}: compiler_options {given!r:.80} is not a mapping; give {{"xla_...": value}}')
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in given.items()}
    for name, value in plain.items():
        if not isinstance(name, str) or not isinstance(value, str | bool | int | float):
            raise TypeError(
                f"{who}: compiler_options has {name!r:.80}: {value!r:.80}; names are strings, and values strings, "
                "numbers or bools"
            )
    return plain


def check_known(who: str, mesh: Mesh | AbstractMesh, given: Mapping[str, Value]) -> None:
    """Compiles a trivial program with the options, for the mesh.

    Raises:
      ValueError: the compiler does not know an option, or refuses its value.
    """
    if not given or isinstance(mesh, AbstractMesh):
        return
    nothing = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P()))
    try:
        jax.jit(lambda x: x, compiler_options=dict(given)).lower(nothing).compile()
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" not in str(error):
            raise
        unknown = re.search(r"No such compile option: '([^']*)'", str(error))
        compiler = f"the {platform_of(mesh).upper()} compiler of jax {jax.__version__}"
        if unknown:
            raise ValueError(
                f"{who}: compiler_options names {unknown[1]!r}, which {compiler} does not know; check the spelling, or "
                "leave it out"
            ) from None
        raise ValueError(f"{who}: compiler_options {dict(given)!r} is rejected by {compiler}: {error}") from None
