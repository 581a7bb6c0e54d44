"""What a user's MODULE:FUNCTION returned, checked."""

from typing import Any

import jax

from jaxshard.step.step import TrainStep


def checked(what: str, made: Any, wanted: str) -> tuple[TrainStep, Any, Any, *tuple[Any, ...]]:
    """The (step, params, batch, *more) that a function returned.

    Args:
      what: the function, as MODULE:FUNCTION.
      made: what it returned.
      wanted: what it must return, for the error.

    Raises:
      ValueError: it returned something else.
    """
    if not isinstance(made, tuple | list) or len(made) < 3:
        shape = f" of {len(made)}" if isinstance(made, tuple | list) else ""
        raise ValueError(f"{what} returned a {type(made).__name__}{shape}: {wanted}")
    if not isinstance(made[0], TrainStep):
        raise ValueError(f"{what} returned a {type(made[0]).__name__} as the step: {wanted}")
    if any(map(_is_of_optax, jax.tree.leaves(made[2], is_leaf=_is_of_optax))):
        raise ValueError(
            f"{what} returned an optimizer's state where the batch belongs; the command makes the state: {wanted}"
        )
    return tuple(made)  # pyright: ignore[reportReturnType]


def _is_of_optax(x: Any) -> bool:
    return type(x).__module__.startswith("optax")
