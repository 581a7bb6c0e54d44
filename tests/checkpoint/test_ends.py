"""A program that ends, or is interrupted, while a checkpoint is written: nothing is lost in silence, nothing hangs."""

import os
import signal
import subprocess
import sys

import jax.numpy as jnp
import pytest
from clock import at_most

from jaxshard.checkpoint import Checkpointer

NOT_CLOSED = """
import sys
import jax.numpy as jnp
from jaxshard.checkpoint import Checkpointer
checkpoints = Checkpointer(sys.argv[1])
checkpoints.save(1, {"w": jnp.arange(3.0)}, blocking=True)
checkpoints.save(2, {"w": jnp.arange(2.0**24)})
print("the end")
"""


@pytest.mark.parametrize("name", ["plain", "a[b]"])
def test_a_program_that_does_not_close_is_told_what_was_not_saved_and_ends(tmp_path, name):
    """Orbax's threads cannot go on once Python ends; they waited for each other for minutes, or ended in silence."""
    with at_most(60):
        run = subprocess.run(
            [sys.executable, "-c", NOT_CLOSED, str(tmp_path / name)],
            capture_output=True,
            text=True,
            timeout=100,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            check=False,
        )
    assert run.stdout == "the end\n"
    steps = Checkpointer(tmp_path / name).steps()
    if steps == [1]:
        assert f"jaxshard: {tmp_path / name / '2'} was NOT saved: Python ended first. Call close()" in run.stderr
        assert run.returncode == 1
    else:  # it was fast
        assert steps == [1, 2]
        assert run.returncode == 0


def wait_on(checkpoints):
    while True:
        checkpoints.wait()


def test_after_ctrl_c_close_still_waits(tmp_path):
    """The lock is not given up while something is written."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        checkpoints = Checkpointer(tmp_path)
        checkpoints.save(1, {"w": jnp.arange(2.0**23)})
        signal.setitimer(signal.ITIMER_REAL, 1e-3)
        with pytest.raises(KeyboardInterrupt):
            wait_on(checkpoints)
        checkpoints.close()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert checkpoints.steps() == [1]


IN_A_THREAD = """
import sys, threading
import jax.numpy as jnp
from jaxshard.checkpoint import Checkpointer

def train():
    threading.main_thread().join()
    Checkpointer(sys.argv[1]).save(1, {"w": jnp.arange(3.0)})

threading.Thread(target=train).start()
"""


def test_a_thread_that_outlives_the_main_one_is_told_why_it_cannot_save(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", IN_A_THREAD, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert "it was not saved: the main thread has ended; let it wait" in run.stderr
    assert Checkpointer(tmp_path).steps() == []


# What keeps a save from being written, from then on: a full disk.
FAILS = {
    "files": "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, 2**19))",
    "folders": """
import errno
from etils import epath
def mkdir(path, *args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device", str(path))
type(epath.Path("/")).mkdir = mkdir
""",
}
SAVE_FAILS = """
import sys
import jax.numpy as jnp
from jaxshard.checkpoint import Checkpointer
checkpoints = Checkpointer(sys.argv[1])
state = {{f"w{{i}}": jnp.full(2**17, i, "f") for i in range(40)}}
checkpoints.save(1, state, blocking=True)
{fails}
for step in (2, 3):
    try:
        checkpoints.save(step, state)
        checkpoints.wait()
    except OSError as error:
        print(str(checkpoints.path) in str(error), flush=True)
checkpoints.close()
"""


@pytest.mark.parametrize("fails", FAILS)
def test_a_program_whose_save_failed_ends_and_prints_nothing_more(tmp_path, fails):
    """Orbax's threads waited for its folders for minutes; arrays told its closed event loop that they had ended."""
    with at_most(60):
        run = subprocess.run(
            [sys.executable, "-c", SAVE_FAILS.format(fails=FAILS[fails]), str(tmp_path / "saves")],
            capture_output=True,
            text=True,
            timeout=100,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            check=False,
        )
    assert (run.returncode, run.stdout, run.stderr) == (0, "True\nTrue\n", "")
    assert Checkpointer(tmp_path / "saves").steps() == [1]
