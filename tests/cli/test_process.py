"""The command as a process: its output goes away, its terminal closes, Ctrl-C comes at any moment."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from compiled_once import fast_flags

from jaxshard.checkpoint import Checkpointer
from jaxshard.system.command import Lasting

ROOT = Path(__file__).parents[2]
TINY = """
[model]
layers = 1
width = 16
heads = 1
hidden = 16
sequence_length = 16
[optimizer]
warmup_steps = 1
[sharding]
devices = 2
[train]
steps = 3
log_every = 1
[data]
heldout_bytes = 700
"""


@pytest.fixture
def tiny(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    return str(tmp_path / "tiny.toml")


@contextlib.contextmanager
def started(*arguments, prefix=(), environment=None, **popen):
    """The command in a process of its own, which is gone afterwards."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "COLUMNS"))}
    made = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": fast_flags()} | (environment or {})
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": kept | made} | popen
    process = subprocess.Popen([*prefix, sys.executable, "-m", "jaxshard", *map(str, arguments)], **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ran(*arguments, seconds=120, **options):
    """(exit status, standard output, standard error) of the command."""
    with started(*arguments, **options) as process:
        out, err = process.communicate(timeout=seconds)
        return process.returncode, out, err


def saved_steps(folder):
    return Checkpointer(folder / "model").steps()


# Output that goes away.


class Gone(io.StringIO):
    """A stream whose reader has left, or whose disk is full."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, text):
        raise self.error

    flush = write


@pytest.mark.parametrize(
    "error", [BrokenPipeError(32, "Broken pipe"), OSError(5, "Input/output error"), ValueError("x")]
)
def test_a_stream_that_is_gone_is_told_once_and_written_to_in_silence(error):
    told = []
    stream = Lasting(Gone(error), told.append)
    for _ in range(3):
        assert stream.write("text") == 4
        stream.flush()
    assert told == [error]
    assert not stream.isatty()


def test_a_run_goes_on_when_who_reads_its_output_has_left(tmp_path, tiny):
    """`jaxshard train | head`: a BrokenPipeError ended it with status 1 and nothing saved."""
    with started("train", tiny, "--out", tmp_path / "run") as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(120) == 0
        assert "standard output is closed (Broken pipe): the run continues without it" in process.stderr.read()
    assert saved_steps(tmp_path / "run") == [3]


@pytest.mark.parametrize("redirected", [">/dev/full", ">/dev/full 2>/dev/full", ">&- 2>&- <&-"])
def test_a_run_goes_on_without_a_place_for_its_output(tmp_path, tiny, redirected):
    """A full disk, and files that were never open: a data file must not take their place."""
    shell = ["sh", "-c", f'exec "$@" {redirected}', "sh"]
    status, _, err = ran("train", tiny, "--out", tmp_path / "run", prefix=shell)
    assert status == 0
    assert saved_steps(tmp_path / "run") == [3]
    assert ("standard output is closed (No space left on device)" in err) == (redirected == ">/dev/full")


def test_two_processes_go_on_and_show_no_lines_of_gloo(tmp_path, tiny):
    with started("train", tiny, "--out", tmp_path / "run", "--processes", 2) as process:
        said = process.stdout.readline()
        process.stdout.close()
        assert process.wait(120) == 0
        assert (
            process.stderr.read()
            == "jaxshard train: standard output is closed (Broken pipe): the run continues without it\n"
        )
    assert "parameters, zero2 on 2 x cpu" in said  # gloo's lines came first
    assert saved_steps(tmp_path / "run") == [3]


@pytest.mark.parametrize("command", ["plan", "ckpt"])
def test_a_full_disk_behind_the_output_is_told(command):
    status, _, err = ran(command, "--help", prefix=["sh", "-c", 'exec "$@" >/dev/full', "sh"])
    assert (status, err) == (2, f"jaxshard {command}: standard output cannot be written: No space left on device\n")


# Signals.


@pytest.mark.parametrize("moment", ["loading", "compiling", "again"])
def test_ctrl_c_at_any_moment_ends_with_130(tmp_path, tiny, moment):
    """While XLA compiled, Python's end crashed it (139), or the interrupt was lost and the run went on."""
    with started("train", tiny, "--out", tmp_path / "run", "--model.layers", 8, "--model.no-remat") as process:
        if moment == "loading":
            time.sleep(0.4)
        else:
            process.stdout.readline()  # it is printed before the step is traced and compiled
            time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        if moment == "again":
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
        assert process.returncode == 130
        assert "Traceback" not in err
        if moment == "compiling":
            assert err == "jaxshard train: interrupted; nothing was saved\n"


def test_ctrl_c_in_a_plan_ends_with_130():
    with started("plan", "--fit") as process:
        time.sleep(4)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert (process.returncode, "Traceback" in err) == (130, False)


def until_a_step(process):
    for line in process.stdout:
        if line.startswith("step"):
            return
    raise AssertionError(process.stderr.read())


@pytest.mark.parametrize("count", [1, 2])
def test_a_terminal_that_closes_ends_the_run_with_a_save(tmp_path, tiny, count):
    """SIGHUP, twice, as a shell and the kernel send it; the run was killed."""
    more = ["--processes", count] if count > 1 else []
    with started("train", tiny, "--out", tmp_path / "run", "--train.steps", 10**6, *more) as process:
        until_a_step(process)
        process.send_signal(signal.SIGHUP)
        process.stdout.close()
        process.stderr.close()
        time.sleep(0.01)
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 129
    assert saved_steps(tmp_path / "run")[-1] > 0


def test_under_nohup_a_terminal_may_close(tmp_path, tiny):
    with started("train", tiny, "--out", tmp_path / "run", "--train.steps", 10**6, prefix=["nohup"]) as process:
        until_a_step(process)
        process.send_signal(signal.SIGHUP)
        until_a_step(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    assert saved_steps(tmp_path / "run")[-1] > 0
