"""An error of the system while a checkpoint is read says nothing of its bits: it is raised, and nothing is renamed."""

import contextlib
import errno
import itertools
import os
import resource
import shutil
import subprocess
import sys
import threading
import warnings

import jax.numpy as jnp
import pytest
from clock import at_most
from test_checkpointer import data_files

import jaxshard.checkpoint
from jaxshard.checkpoint import Checkpointer, CorruptCheckpointError
from jaxshard.checkpoint.storage import errors, orbax_store, sizes
from jaxshard.cli import main
from jaxshard.system import small_files

SAVED = {"w": jnp.arange(4096.0), "n": 3}
READ = ("_CHECKPOINT_METADATA", "state/_METADATA", "state/manifest.ocdbt")
UNREADABLE = "/proc/self/mem"  # a regular file; Linux answers a read of its first bytes by EIO


@pytest.fixture
def saves(tmp_path):
    """A folder with the steps 10 and 20."""
    with Checkpointer(tmp_path / "saves") as checkpoints:
        checkpoints.save(10, SAVED)
        checkpoints.save(20, SAVED)
    return tmp_path / "saves"


def step_folders(saves):
    return sorted(path.name for path in saves.iterdir() if path.is_dir())


def places(step):
    """The files of a step that a restore reads."""
    return [*(step / name for name in READ), data_files(step)[-1]]


@contextlib.contextmanager
def failing(path):
    """Reads of this file fail by EIO, in Python and in C++."""
    away = path.with_name(f"{path.name}.away")
    path.rename(away)
    path.symlink_to(UNREADABLE)
    try:
        yield
    finally:
        path.unlink()
        away.rename(path)


def refused(call, number):
    """Nothing but the system's error, and no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(OSError, match="cannot be read: ") as raised:
            call()
    assert raised.value.errno == number
    assert os.strerror(number) in str(raised.value)
    assert "try again" in str(raised.value)


# Real errors.


@pytest.mark.parametrize("place", range(4))
def test_a_disk_that_fails_stops_and_says_so(saves, monkeypatch, place):
    """Not even a save of the same step renames it afterwards."""
    path = places(saves / "20")[place]
    monkeypatch.setattr(errors, "_PAUSES", (0.01, 0.02, 0.03))
    with Checkpointer(saves) as checkpoints:
        with failing(path):
            refused(lambda: checkpoints.restore(SAVED), errno.EIO)
            refused(lambda: checkpoints.restore(SAVED, 20), errno.EIO)
            refused(lambda: jaxshard.checkpoint.read(saves), errno.EIO)
            refused(lambda: checkpoints.verify(20), errno.EIO)
        checkpoints.save(20, SAVED, blocking=True)
        assert checkpoints.restore(SAVED)[0] == 20
    assert step_folders(saves) == ["10", "20"]


@pytest.mark.parametrize("place", range(4))
def test_a_disk_that_fails_for_a_moment_is_asked_again(saves, place):
    step, failed = saves / "20", contextlib.ExitStack()
    failed.enter_context(failing(places(step)[place]))
    mended = threading.Timer(0.3, failed.close)
    mended.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Checkpointer(saves).restore(SAVED)[0] == 20
    mended.join()


@pytest.mark.parametrize("left", [0, 2, 8])
def test_too_many_open_files_stop_and_say_so(saves, monkeypatch, left):
    monkeypatch.setattr(errors, "_PAUSES", (0.01, 0.02, 0.03))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/dev/fd"))) + 1
    holes = list(itertools.takewhile(lambda number: number < highest, iter(lambda: os.open(os.devnull, 0), None)))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + left, hard))
        refused(lambda: Checkpointer(saves).restore(SAVED), errno.EMFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in holes:
            os.close(number)
    assert Checkpointer(saves).restore(SAVED)[0] == 20
    assert step_folders(saves) == ["10", "20"]


AS_NOBODY = """
import os, pathlib, sys, warnings
import jax, jax.numpy as jnp
from jaxshard.checkpoint import Checkpointer
warnings.simplefilter("error")
template = {"w": jnp.zeros(4096), "n": 0}
checkpoints = Checkpointer(sys.argv[1])
for step in (10, 20):
    assert checkpoints.restore(template, step)[0] == step  # all is imported by now
if os.getuid() == 0:
    os.seteuid(65534)
for path in map(pathlib.Path, sys.argv[2:]):
    os.seteuid(os.getuid())
    mode = path.stat().st_mode
    path.chmod(0)
    if os.getuid() == 0:
        os.seteuid(65534)
    try:
        print(path.name, checkpoints.restore(template)[0])
    except PermissionError as error:
        print(path.name, error.strerror)
    os.seteuid(os.getuid())
    path.chmod(mode)
"""


def test_what_belongs_to_another_user_is_not_passed_over(tmp_path, saves):
    """As root the child gives up its rights; the step's folder itself may be closed, too."""
    for path in (saves, *saves.rglob("*"), *saves.parents[:3]):
        path.chmod(path.stat().st_mode | 0o755)
    asked = [*places(saves / "20"), saves / "20", saves / "20" / "state"]
    run = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, str(saves), *map(str, asked)],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    lines = run.stdout.splitlines()
    assert len(lines) == len(asked), run.stderr
    for line in lines:
        assert "cannot be read: Permission denied; give this user permission to read it" in line
    assert step_folders(saves) == ["10", "20"]


# What the system can answer, at each call.

NUMBERS = (errno.EACCES, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.EPERM, errno.EBUSY)


def once(function, error):
    """The function, whose first call raises."""
    errors = [error]

    def call(*args, **options):
        if errors:
            raise errors.pop()
        return function(*args, **options)

    return call


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("place", ["stat", "listdir", "index", "arrays", "arrays, in words"])
def test_one_error_at_any_call_takes_no_older_step(saves, monkeypatch, number, place):
    """40 injections. It comes back whole where the error may pass; no rights do not come back."""
    code = "PERMISSION_DENIED" if number in (errno.EACCES, errno.EPERM) else "UNKNOWN"
    error = OSError(number, os.strerror(number), "/a")
    if place == "arrays, in words":
        error = ValueError(f"{code}: Error reading local file \"/a\": Failed to read [os_error_code='{number}']")
    where, name = {"stat": (os, "stat"), "listdir": (os, "listdir"), "index": (small_files, "read")}.get(
        place, (orbax_store, "read")
    )
    with Checkpointer(saves) as checkpoints:
        monkeypatch.setattr(where, name, once(getattr(where, name), error))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if number in (errno.EACCES, errno.EPERM):
                refused(lambda: checkpoints.restore(SAVED), number)
            assert checkpoints.restore(SAVED)[0] == 20
        checkpoints.save(20, SAVED, blocking=True)
    assert step_folders(saves) == ["10", "20"]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("RESOURCE_EXHAUSTED: out of memory"),
        ValueError("DEADLINE_EXCEEDED: no answer"),
        ValueError("UNAVAILABLE: the server is away"),
        ValueError("INTERNAL: a word that nobody knew"),
        RuntimeError("anything else"),
    ],
)
def test_what_is_not_proven_is_not_called_corrupt(saves, monkeypatch, error):
    def read(*_):
        raise error

    monkeypatch.setattr(orbax_store, "read", read)
    monkeypatch.setattr(errors, "_PAUSES", (0.01, 0.02, 0.03))
    with pytest.raises(OSError, match="checkpoint 20 cannot be read"):
        Checkpointer(saves).restore(SAVED)


def test_a_refusal_is_no_proof_while_a_file_cannot_be_read(saves, monkeypatch):
    """Libraries turn errors of the system into others: each file is read before a step is called corrupt."""

    def read(*_):
        raise ValueError("DATA_LOSS: a file is empty")

    monkeypatch.setattr(orbax_store, "read", read)
    with failing(data_files(saves / "20")[-1]):
        refused(lambda: Checkpointer(saves).restore(SAVED), errno.EIO)
    with pytest.raises(CorruptCheckpointError):
        Checkpointer(saves).restore(SAVED, 20)


def test_a_step_that_was_just_written_is_not_put_aside_for_an_error_of_the_system(tmp_path, monkeypatch):
    def listed(_):
        raise ValueError("UNKNOWN: [os_error_code='5']")

    with Checkpointer(tmp_path) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(sizes, "listed", listed)
            with pytest.raises(OSError, match="Input/output error"):
                checkpoints.save(1, SAVED, blocking=True)
        assert checkpoints.restore(SAVED)[0] == 1
    assert step_folders(tmp_path) == ["1"]


@pytest.mark.parametrize("name", [*READ, "state/d/another"])
def test_a_file_that_waits_for_others_is_not_waited_for(saves, name):
    """/proc/kmsg calls itself a file; who reads waits for the next message of the kernel. None but root may."""
    path = saves / "20" / name
    path.unlink(missing_ok=True)
    path.symlink_to("/proc/kmsg")
    with at_most(30):
        with contextlib.suppress(OSError, CorruptCheckpointError):
            Checkpointer(saves).verify(20)
        with contextlib.suppress(OSError):
            errors.read_through("checkpoint 20", saves / "20")


def test_ckpt_verify_goes_on_after_a_step_that_cannot_be_read(saves, capsys):
    with failing(saves / "10" / "_CHECKPOINT_METADATA"):
        assert main(["ckpt", "verify", str(saves)]) == 2
        out = capsys.readouterr().out.splitlines()
        assert out[0].startswith("step 10: not read: checkpoint 10 cannot be read: Input/output error")
        assert out[1].startswith("step 20: intact")
        assert main(["ckpt", "ls", str(saves)]) == 0
        assert "not read" in capsys.readouterr().out


def test_a_folder_that_is_linked_into_itself_ends(tmp_path):
    (tmp_path / "a").write_text("1")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert [path.name for path in errors.files_in(tmp_path)] == ["a"]


def test_a_step_that_another_program_deletes_meanwhile_is_passed_over(saves, monkeypatch):
    """`latest_valid` raised FileNotFoundError."""
    verify = Checkpointer.verify

    def late(self, step):
        if (saves / "20").exists() and step == 20:
            shutil.rmtree(saves / "20")
        return verify(self, step)

    monkeypatch.setattr(Checkpointer, "verify", late)
    assert Checkpointer(saves).latest_valid() == 10
    shutil.rmtree(saves / "10")
    assert Checkpointer(saves).latest_valid() is None
