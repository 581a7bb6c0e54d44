"""Prints the modules of jaxshard that a ZeRO-2 training step enters, in order: its first call, and a later one.

    python scripts/walk_step.py

"First" is `place`, `init` and the step that compiles; "later" is a step that runs what was compiled. Counted are calls
of Python functions, by the file that contains them. docs/architecture.md has the list.
"""

import pathlib
import sys
import textwrap
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

import jaxshard

PACKAGE = pathlib.Path(jaxshard.__file__).parent


def modules_entered(call: Callable[[], object]) -> list[str]:
    """The modules whose functions `call` enters, in the order of their first calls."""
    entered: dict[str, None] = {}

    def note(frame, event, argument):
        path = pathlib.Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            entered[str(path.relative_to(PACKAGE).with_suffix(""))] = None

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(entered)


def walk() -> tuple[list[str], list[str]]:
    """The modules that the first step of ZeRO-2 enters, and those of a later one."""
    opt = jaxshard.zero2(optax.adamw(1e-3), jaxshard.make_mesh())
    step = jaxshard.train_step(lambda params, batch: jnp.mean((batch @ params["w"] + params["b"]) ** 2), opt)
    trees = {}

    def train():
        batch = jaxshard.shard_batch(jnp.ones((16, 64)), opt)
        trees["params"], trees["state"], _ = step(trees["params"], trees["state"], batch)

    def begin():
        trees["params"] = opt.place({"w": jnp.ones((64, 128)), "b": jnp.zeros((128,))})
        trees["state"] = opt.init(trees["params"])
        train()

    first = modules_entered(begin)
    train()
    return first, modules_entered(train)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    for name, modules in zip(("first", "later"), walk(), strict=True):
        text = f"{name}: {len(modules)} modules: {' '.join(modules)}"
        print(textwrap.fill(text, 90, subsequent_indent="  ", break_on_hyphens=False))
