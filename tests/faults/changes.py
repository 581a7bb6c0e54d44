"""A table of changes to files and disks under a running `jaxshard train`, and the code that tries each."""

import contextlib
import dataclasses
import fcntl
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from group import Group, program, trainer

from jaxshard.checkpoint import Checkpointer

OPTIONS = """
[model]
layers = 1
width = 16
heads = 2
hidden = 32
sequence_length = 16
[optimizer]
warmup_steps = 2
[sharding]
min_shard_size = 64
[train]
rows = 8
steps = 100000
log_every = 1
eval_every = 100000
save_every = 25
heartbeat_seconds = 10
[data]
heldout_bytes = 700
"""
_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
_SECONDS = 30  # for each run to notice


@dataclasses.dataclass(frozen=True)
class World:
    """The run's folder and its text. `free`: a path that does not exist."""

    run: Path
    text: Path
    free: Path

    @property
    def tokens(self) -> Path:
        return self.text / "train.bin"


@dataclasses.dataclass(frozen=True)
class Change:
    """One change and its expected outcome.

    Attributes:
      act: makes the change.
      words: a regular expression that process 0's output must match.
      saved: the folder of the newest save, with all steps taken, relative to the parent of the run's folder; None: no
        save was possible.
      status: the exit status of all processes.
      signal: to send after `words`, if the run does not end by itself; None: it ends by itself.
      to: the process that gets the signal.
      count: the number of processes.
      disk: the run's folder is on a disk of its own: "tmpfs", "ext4".
      bound: file permissions apply to the run, even as root.
    """

    act: Callable[[World], object]
    words: str = ""
    saved: str | None = "run"
    status: tuple[int, ...] = (1,)
    signal: int | None = None
    to: int = 0
    count: int = 1
    disk: str | None = None
    bound: bool = False


def mounted(kind: str, folder: Path) -> Iterator[None]:
    """Mounts a disk of 24 MB at a folder; needs root."""
    folder.mkdir()
    if kind == "ext4":
        image = folder.with_name("image")
        with image.open("wb") as file:
            file.truncate(24 * 2**20)
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True)
    else:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)


def steps_of(metrics: Path) -> int:
    """The last recorded step."""
    try:
        return max(map(int, re.findall(r'"step": (\d+)', metrics.read_text())), default=0)
    except OSError:
        return 0


def try_out(change: Change, folder: Path) -> str:
    """Applies a change to a run and checks the outcome; returns a line about it."""
    with contextlib.contextmanager(mounted)(change.disk, folder / "disk") if change.disk else contextlib.nullcontext():
        home = folder / "disk" if change.disk else folder / "home"
        home.mkdir(exist_ok=True)
        world = World(home / "run", folder / "text", folder / "free")
        world.text.mkdir()
        (np.arange(200_000) % 250).astype("<u2").tofile(world.tokens)
        (folder / "options.toml").write_text(OPTIONS)
        options = [folder / "options.toml", "--out", world.run, "--data", world.tokens]
        made = program("train_without_rights", *options) if change.bound else trainer(*options)
        with Group(made, folder, change.count, devices=2 // change.count) as group:
            return _tried(change, world, group)


def _tried(change: Change, world: World, group: Group) -> str:
    group.until(lambda: list(world.run.glob("model/*/commit_success.txt")), "a save")
    before, start = steps_of(world.run / "metrics.jsonl"), time.monotonic()
    change.act(world)
    if change.signal:
        if change.words:
            group.until(lambda: re.search(change.words, group.log()), change.words, _SECONDS)
        group.signal(change.signal, change.to)
    statuses = group.wait(_SECONDS)
    seconds, log = time.monotonic() - start, group.log()
    assert tuple(sorted(set(statuses))) == tuple(sorted(set(change.status))), group.text()
    assert "Traceback" not in group.text(), group.text()
    assert re.search(change.words, log), f"not said: {change.words}\n{group.text()}"
    saved = None
    if change.saved is not None:
        folder = os.path.normpath(world.run.parent / change.saved)  # a folder above may have been renamed
        saved = max(Checkpointer(Path(folder) / "model").steps(), default=-1)
        assert saved >= before, f"step {saved} of {before} is saved\n{group.text()}"
    for name in _named(log):
        assert (world.run / name).exists(), f"{name} is named, and is not there\n{group.text()}"
    return f"statuses {statuses} after {seconds:.1f} s, step {saved} saved, of at least {before}"


def _named(log: str) -> list[str]:
    """The files that a run lists at its end."""
    found = re.search(r"^in .*?: ([^;\n]*)", log, re.MULTILINE)
    return found[1].split(", ") if found else []


# The changes.


def rename(name: str, to: str = "free") -> Callable[[World], object]:
    return lambda world: (world.run / name).rename(world.run.parent / to)


def delete(name: str) -> Callable[[World], object]:
    def act(world: World) -> None:
        path = world.run / name
        _gone(path)

    return act


def _gone(path: Path) -> None:
    """Removes a folder that somebody writes to."""
    while path.exists() and path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)


def then(*acts: Callable[[World], object]) -> Callable[[World], object]:
    return lambda world: [act(world) for act in acts]


def put(name: str, kind: str) -> Callable[[World], object]:
    """Creates something at the path: an empty folder, a folder with a file, a file, a dangling link."""

    def act(world: World) -> None:
        path = world.run / name
        if kind == "file":
            path.write_text("another's")
        elif kind == "link":
            path.symlink_to(world.free / "nothing")
        else:
            path.mkdir()
            if kind == "full folder":
                (path / "others").write_text("another's")

    return act


def link_to_moved(name: str) -> Callable[[World], object]:
    def act(world: World) -> None:
        (world.run / name).rename(world.free)
        (world.run / name).symlink_to(world.free)

    return act


def link_to_copy(name: str) -> Callable[[World], object]:
    def act(world: World) -> None:
        shutil.copytree(world.run / name, world.free, ignore=shutil.ignore_patterns("*tmp*"))
        _gone(world.run / name)
        (world.run / name).symlink_to(world.free)

    return act


def another_runs_model(world: World) -> None:
    with Checkpointer(world.free) as others:
        others.save(3, {"w": np.zeros(3)})
    _gone(world.run / "model")
    world.free.rename(world.run / "model")


def mode(name: str, bits: int) -> Callable[[World], object]:
    return lambda world: (world.run / name).chmod(bits)


def rename_parent(world: World) -> None:
    world.run.parent.rename(world.free)


def unmount(world: World) -> None:
    subprocess.run(["umount", "--lazy", str(world.run.parent)], check=True)


def lose_disk(world: World) -> None:
    number = os.open(world.run.parent, os.O_RDONLY)
    try:
        fcntl.ioctl(number, _SHUTDOWN, (2).to_bytes(4, "little"))
    finally:
        os.close(number)


def fill_disk(world: World) -> None:
    with contextlib.suppress(OSError), (world.run.parent / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def tokens(change: Callable[[Path], object]) -> Callable[[World], object]:
    return lambda world: change(world.tokens)


def write_over(number: int) -> Callable[[Path], object]:
    def act(path: Path) -> None:
        with path.open("r+b") as file:
            file.write(np.full(path.stat().st_size // 2, number, "<u2").tobytes())

    return act


def replace_by(number: int | None) -> Callable[[Path], object]:
    """Replaces the tokens by a file of one number, or of the same tokens."""

    def act(path: Path) -> None:
        new = path.with_name("new")
        shutil.copyfile(path, new)
        if number is not None:
            write_over(number)(new)
        new.replace(path)

    return act


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(2000))


MOVED = (
    r"--out \S+ is no longer the folder that the run started in: it is now \S+; step \d+ is saved in \S+; to resume: "
)
GONE = (
    r"is no longer the folder that the run started in: it was deleted or unmounted; step \d+ is saved in \S+; to resume"
)
RESCUED = r"it was deleted or unmounted; step \d+ is saved in \S+\.rescued; to resume"
OTHERS = r"model was replaced, and does not belong to this run; step \d+ is saved in \S+\.rescued; to resume"
BESIDE = r"step \d+ is saved in \S+\.rescued; to resume"
NOR = r"step \d+ could not be saved elsewhere either: "
ANEW = "model was moved, deleted or replaced: earlier saves may be lost"
BEGINS = r"was moved, deleted or replaced: a new file begins at step \d+"
TERM, INT, HUP, USR1, USR2 = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
ON = {"signal": TERM, "status": (143,)}  # the run goes on until the signal

CHANGES = {
    "run folder renamed": Change(rename("", "new"), MOVED, "new"),
    "renamed, an empty folder in its place": Change(then(rename("", "new"), put("", "folder")), MOVED, "new"),
    "renamed, a full folder in its place": Change(then(rename("", "new"), put("", "full folder")), MOVED, "new"),
    "renamed, a file in its place": Change(then(rename("", "new"), put("", "file")), MOVED, "new"),
    "renamed, a link to nothing in its place": Change(then(rename("", "new"), put("", "link")), MOVED, "new"),
    "moved, and a link leads there": Change(link_to_moved(""), **ON),
    "a link to a copy": Change(link_to_copy(""), RESCUED, "run.rescued"),
    "run folder deleted": Change(delete(""), GONE),
    "deleted, a full folder in its place": Change(then(delete(""), put("", "full folder")), RESCUED, "run.rescued"),
    "deleted, a file in its place": Change(then(delete(""), put("", "file")), RESCUED, "run.rescued"),
    "the folder above renamed": Change(rename_parent, MOVED, "../free/run"),
    "unmounted": Change(unmount, GONE, disk="tmpfs"),
    "the disk lost": Change(lose_disk, f"Input/output error.*{NOR}", None, disk="ext4"),
    "the disk full": Change(fill_disk, f"[Nn]o space.*{NOR}", None, disk="tmpfs"),
    "run folder without rights": Change(mode("", 0), f"Permission denied.*{BESIDE}", "run.rescued", bound=True),
    "model without rights": Change(mode("model", 0o500), f"Permission denied.*{BESIDE}", "run.rescued", bound=True),
    "model renamed": Change(rename("model"), ANEW, **ON),
    "model deleted": Change(delete("model"), ANEW, **ON),
    "model is another run's": Change(another_runs_model, OTHERS, "run.rescued"),
    "model is a file": Change(then(delete("model"), put("model", "file")), OTHERS, "run.rescued"),
    "model is a link to nothing": Change(then(delete("model"), put("model", "link")), OTHERS, "run.rescued"),
    "model moved, and a link leads there": Change(link_to_moved("model"), **ON),
    "model is a link to a copy": Change(link_to_copy("model"), ANEW, **ON),
    "metrics deleted": Change(delete("metrics.jsonl"), f"metrics.jsonl {BEGINS}", **ON),
    "metrics renamed": Change(rename("metrics.jsonl"), f"metrics.jsonl {BEGINS}", **ON),
    "metrics are a folder": Change(
        then(delete("metrics.jsonl"), put("metrics.jsonl", "folder")), "metrics.jsonl lacks metrics from here on", **ON
    ),
    "options deleted": Change(delete("config.toml"), "config.toml was missing: it is written again", **ON),
    "tensorboard deleted": Change(delete("tensorboard"), f"tensorboard {BEGINS}", **ON),
    "tensorboard renamed": Change(rename("tensorboard"), f"tensorboard {BEGINS}", **ON),
    "tokens cut short": Change(tokens(lambda path: os.truncate(path, 1000)), "truncated.*; the last save is step"),
    "tokens emptied": Change(tokens(lambda path: os.truncate(path, 0)), "truncated.*; the last save is step"),
    "tokens written over": Change(tokens(write_over(3)), "its tokens differ from.*; the last save is step"),
    "tokens out of range": Change(tokens(write_over(60_000)), "its tokens differ from.*; the last save is step"),
    "tokens replaced": Change(tokens(replace_by(3)), "its tokens differ from.*; the last save is step"),
    "tokens replaced by the same": Change(tokens(replace_by(None)), **ON),
    "tokens appended": Change(tokens(append), **ON),
    "tokens deleted": Change(tokens(Path.unlink), "cannot be read any more: No such file.*; the last save is step"),
    "SIGUSR1": Change(lambda world: None, signal=USR1, status=(138,)),
    "SIGUSR2": Change(lambda world: None, signal=USR2, status=(140,)),
    "SIGUSR1 and the folder renamed": Change(rename("", "new"), saved="new", signal=USR1),
    "SIGTERM and the folder renamed": Change(rename("", "new"), saved="new", signal=TERM),
    "SIGHUP and the folder deleted": Change(delete(""), signal=HUP),
    "Ctrl-C and the model deleted": Change(delete("model"), signal=INT, status=(130,)),
    "two processes, SIGUSR1": Change(lambda world: None, signal=USR1, to=1, status=(138, 143), count=2),
    "two processes, tokens cut short": Change(
        tokens(lambda path: os.truncate(path, 1000)), "truncated.*; the last save is step", None, count=2
    ),
    "two processes, renamed": Change(rename("", "new"), MOVED, "new", count=2),
    "two processes, deleted": Change(delete(""), GONE, count=2),
    "two processes, model deleted": Change(delete("model"), ANEW, count=2, **ON),
    "two processes, another run's model": Change(another_runs_model, OTHERS, "run.rescued", count=2),
    "two processes, metrics deleted": Change(delete("metrics.jsonl"), BEGINS, count=2, **ON),
}
