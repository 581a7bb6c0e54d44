"""Commands that compute on the CPU alone: they start no accelerator, and take none from others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import jax

from jaxshard.system.command import INTERRUPTED, ended_at_once, fail


def run(command: str, act: Callable[[], int], **options: object) -> int:
    """Does a command's work under these options of JAX; returns the exit status, 2 for bad input."""
    try:
        with configured(**options), ended_at_once(lambda: f"{command}: interrupted"):
            return act()
    except (ValueError, OSError, ImportError) as error:
        return fail(command, error, 2)
    except KeyboardInterrupt:
        return fail(command, "interrupted", INTERRUPTED)


@contextlib.contextmanager
def configured(**options: object) -> Iterator[None]:
    """While entered, JAX is on the CPU, if it did not start yet, and has these options."""
    options = {"jax_platforms": "cpu", **options}
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
