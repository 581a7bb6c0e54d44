"""A line of the user's, where the user writes in a notebook."""

import subprocess
import sys

import pytest

CELLS = (
    "import jax, jax.numpy as jnp, optax, jaxshard",
    "def loss(params, x):\n    h = x @ params\n    return jnp.mean((h - h.mean(0)) ** 2)",
    "step = jaxshard.train_step(loss, jaxshard.ddp(optax.sgd(1.0), jaxshard.make_mesh()))\n"
    "print(step.layout(jnp.ones((3, 3)), jnp.ones((8, 3))))",
)
SHELL = f"""
import sys
import jax
from IPython.core import compilerop
from IPython.core.interactiveshell import InteractiveShell
from ipykernel import compiler

jax.config.update("jax_num_cpu_devices", 2)
shell = InteractiveShell.instance()
shell.compile = eval(sys.argv[1])()
for cell in {CELLS!r}:
    shell.run_cell(cell, store_history=True).raise_error()
"""


@pytest.mark.parametrize("compiler", ["compiler.XCachingCompiler", "compilerop.CachingCompiler"])
def test_a_line_in_a_notebook_is_named_by_its_cell(compiler):
    """In Jupyter, and in a terminal: its file is a temporary one, or none, which says nothing to a reader."""
    done = subprocess.run([sys.executable, "-c", SHELL, compiler], capture_output=True, text=True, check=False)
    assert "at Cell In[2], line 3 uses it" in " ".join(done.stdout.split()), done.stdout + done.stderr
    assert "ipykernel_" not in done.stdout
    assert "<ipython-input" not in done.stdout


def test_an_ipython_that_names_no_cells_is_none():
    """Before 8 its compiler had no such method; the line is still told."""
    old = "type('Old', (compilerop.CachingCompiler,), {'format_code_name': None})"
    done = subprocess.run([sys.executable, "-c", SHELL, old], capture_output=True, text=True, check=False)
    assert "of a mean" in done.stdout, done.stdout + done.stderr
    assert ":3 uses it" in " ".join(done.stdout.split())
