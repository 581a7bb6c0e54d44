"""Paths for orbax: plain ones, which it handles correctly, and durable ones, which sync a step before naming it.

Orbax commits by a glob that begins with the path, so that * ? and [ in a path match other names, and the checkpoint is
lost without an error. It also turns a backslash into a slash, takes `gs:` and the like for buckets, refuses names that
are not UTF-8, and makes long paths longer than the system allows. On Linux an open folder has a second, plain path,
/proc/self/fd/<its number>, which stays valid if the folder is renamed and vanishes if the process is killed.
"""

import contextlib
import fcntl
import itertools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from etils.epath.gpath import PosixGPath

from jaxshard.processes import agreement
from jaxshard.system import files

_OPEN_FOLDERS = Path("/proc/self/fd")
_MISREAD = re.compile(r"[*?\[\\]|\w:/")
_LONG = 3000  # characters; orbax adds up to 1000, and Linux allows 4096 bytes
_LEAST = 64  # most processes have free descriptors from here on


def is_plain(folder: Path) -> bool:
    """Whether orbax handles this folder's path correctly.

    >>> is_plain(Path("/runs/lr=3")), is_plain(Path("/runs/[lr=3]"))
    (True, False)
    """
    if len(str(folder)) > _LONG:
        return False
    try:
        return not _MISREAD.search(f"{folder}/".encode().decode())
    except UnicodeEncodeError:
        return False


def check_path(folder: Path) -> None:
    """Raises ValueError if the folder has no plain path; on Linux every folder has one."""
    if not is_plain(folder) and not _OPEN_FOLDERS.is_dir():
        raise ValueError(
            f"Checkpointer: {str(folder)!r} has a character that makes orbax lose checkpoints (* ? [ ], a backslash, a "
            "colon before a slash, or one that is not UTF-8); use a different folder"
        )


class PlainPath:
    """A path of a folder that orbax handles correctly, until `close`.

    Attributes:
      folder: its own path.
      path: the path for orbax.

    >>> import contextlib
    >>> with contextlib.closing(PlainPath.of(Path("/"))) as plain:
    ...     str(plain.path)
    '/'
    """

    def __init__(self, folder: Path, number: int | None = None):
        self.folder, self._number = folder, number
        self.path = folder if number is None else _OPEN_FOLDERS / str(number)

    @classmethod
    def of(cls, folder: Path) -> Self:
        """A path for this process alone.

        Raises:
          OSError: the folder does not exist.
        """
        return cls(folder, None if is_plain(folder) else _opened(folder, 3))

    @classmethod
    def of_all(cls, folder: Path) -> Self:
        """The same path on all processes, as orbax needs for a joint save.

        Raises:
          OSError: on all processes, if one cannot open the folder.
        """
        if is_plain(folder):
            return cls(folder)
        least = _LEAST
        while True:
            number = agreement.together("save", lambda least=least: _opened(folder, least))
            numbers = [int(each) for each in agreement.gathered("save", str(number))]
            if len(set(numbers)) == 1:
                return cls(folder, number)
            os.close(number)
            least = max(numbers)

    def named_in(self, error: BaseException) -> BaseException:
        """An error of orbax, with the folder's own path in its message."""
        if self.path != self.folder and not isinstance(error, OSError):
            error.args = (str(error).replace(str(self.path), str(self.folder)),)
        return error

    def close(self) -> None:
        """Closes the folder; its number may then come to stand for another one."""
        if self._number is not None:
            os.close(self._number)
            self._number = None


def among_those_present(context: Any) -> None:
    """Lets only the processes that are present (`agreement.among`) take part in a save, the first as its head."""
    if not agreement.are_all_present():
        present = agreement.present()
        context.multiprocessing.active_processes = set(present)
        context.multiprocessing.primary_host = present[0]
        context.multiprocessing.barrier_sync_key_prefix = f"jaxshard_{'_'.join(map(str, present))}_"


@contextlib.contextmanager
def of_those_present() -> Iterator[None]:
    """While not all processes are present, lets orbax start a save by these alone; there is no public way.

    Orbax 0.12 compares the path between all processes of the job whatever `active_processes` says, and would wait for
    those of other meshes (`Checkpointer.save` compares it); and barriers of two groups would have the same name, since
    some have the operation's number alone.
    """
    if agreement.are_all_present():
        yield
        return
    with contextlib.ExitStack() as undo:
        present, saving, numbers = agreement.present(), sys.modules.get(_SAVING), sys.modules.get(_NUMBERS)
        if hasattr(saving, "_check_directory_consistency"):
            undo.enter_context(_replaced(saving, "_check_directory_consistency", lambda directory: None))
        if generator := getattr(numbers, "OperationIdGenerator", None):
            count = _counts.setdefault(present, itertools.count((1 + present[0]) * 10**9))
            undo.enter_context(_replaced(generator, "_operation_id_counter", count))
        yield


_SAVING = "orbax.checkpoint.experimental.v1._src.saving.execution"
_NUMBERS = "orbax.checkpoint._src.futures.synchronization"
_counts: dict[tuple[int, ...], Iterator[int]] = {}  # each group's own numbers


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _opened(folder: Path, least: int) -> int:
    """Opens a folder; returns its descriptor, at least `least`."""
    first = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, least)
    finally:
        os.close(first)


# Orbax syncs only the arrays, not the index, the commit marker or the folders, and commits by renaming the step's
# folder. The path class here syncs the folder's content before the rename, and the name after it.


class Written:
    """The folders that orbax makes for one save.

    Attributes:
      named: the names under which folders are on the disk so far.
      failed: why a folder could not be made. The rename raises it: raised earlier, orbax's threads would wait for the
        folder for minutes, in all processes, even when Python exits.
    """

    def __init__(self) -> None:
        self.named: list[str] = []
        self.failed: list[OSError] = []

    def paths(self) -> type[PosixGPath]:
        """The class of paths for this save."""
        written = self

        class DurablePath(PosixGPath):
            def mkdir(self, *args: Any, **kwargs: Any) -> None:
                try:
                    super().mkdir(*args, **kwargs)
                except OSError as error:
                    written.failed.append(error)

            def rename(self, target: str | os.PathLike[str]) -> "DurablePath":
                """Renames a folder; if the name cannot be synced, restores the old one."""
                if written.failed:
                    raise written.failed[0]
                source, named = Path(self), Path(target)
                files.sync_tree(source)
                source.rename(named)
                try:
                    files.sync_folder(named.parent)
                except OSError:
                    with contextlib.suppress(OSError):
                        named.rename(source)
                    raise
                written.named.append(named.name)
                return type(self)(target)

        return DurablePath
