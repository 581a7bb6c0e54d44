"""A step that a user's own function makes (`jaxshard explain MODULE:FUNCTION`), checked; and put on other devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxshard.cli.explain.explanation import Subject
from jaxshard.step.step import TrainStep, loss_of, on_mesh
from jaxshard.system.users_code import UsersError as UsersError
from jaxshard.system.users_code import blamed as blamed
from jaxshard.system.users_code import called
from jaxshard.system.users_code import names_function as names_function

_WANTED = "it must return (step, params, batch, *more), where step = jaxshard.train_step(loss_fn, opt)"


def made_by(what: str) -> Subject:
    """What the function returns.

    Args:
      what: "module:function"; the module is looked for in the current folder, too.

    Raises:
      ValueError: there is no such function, or it returns something else.
      UsersError: the module cannot be imported, or the function fails.
    """
    made = called(what)
    if not isinstance(made, tuple | list) or len(made) < 3:
        shape = f" of {len(made)}" if isinstance(made, tuple | list) else ""
        raise ValueError(f"{what} returned a {type(made).__name__}{shape}: {_WANTED}")
    if not isinstance(made[0], TrainStep):
        raise ValueError(f"{what} returned a {type(made[0]).__name__} as the step: {_WANTED}")
    with blamed(what):
        return Subject.of(*made)


def on_devices(what: str, subject: Subject, devices: Sequence[Any]) -> Subject:
    """The same on other devices, as many as the step's mesh has.

    Raises:
      ValueError: there are more or fewer.
    """
    mesh = loss_of(subject.step).setup.mesh
    if mesh.size != len(devices):
        sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
        raise ValueError(
            f"{what} makes a mesh of {mesh.size} devices ({sizes}), and there are {len(devices)}: make it of all of "
            "jax.devices(), as jaxshard.make_mesh() does, or name a machine of that size"
        )
    new = jax.make_mesh(tuple(mesh.shape.values()), mesh.axis_names, devices=devices, axis_types=mesh.axis_types)
    return subject._replace(step=on_mesh(subject.step, new))
