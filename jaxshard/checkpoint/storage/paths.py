"""Paths that orbax is given: plain ones, which it reads right, and durable ones: a step is on the disk before its name.

Orbax's last step looks for files by a pattern that begins with the path, so that * ? and [ in it stand for other names;
what it writes is then lost, without an error. A backslash becomes a slash, `gs:` and the like are taken for buckets,
names that are not UTF-8 are refused, and long paths leave no room for what orbax adds. On Linux an open folder has
another path, /proc/self/fd/<its number>: it stays right even if the folder is renamed, and nothing is left where a
process is killed.
"""

import contextlib
import fcntl
import os
import re
from pathlib import Path
from typing import Any, Self

from etils.epath.gpath import PosixGPath

from jaxshard.processes import agreement
from jaxshard.system import files

_OPEN_FOLDERS = Path("/proc/self/fd")
_MISREAD = re.compile(r"[*?\[\\]|\w:/")
_LONG = 3000  # characters; what orbax writes below has another thousand, and Linux takes 4096 bytes
_LEAST = 64  # the numbers from here on are free in most processes


def is_plain(folder: Path) -> bool:
    """Whether orbax reads the path of this folder right.

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
    """Raises ValueError for a folder that has no plain path: only Linux gives one to every folder."""
    if not is_plain(folder) and not _OPEN_FOLDERS.is_dir():
        raise ValueError(
            f"Checkpointer: {str(folder)!r} has a character under which orbax loses what is saved (* ? [ ], a "
            "backslash, a colon before a slash, or one that is not UTF-8); name another folder"
        )


class PlainPath:
    """A path of a folder that orbax reads right, until `close`.

    Attributes:
      folder: by its own path.
      path: what orbax is given.

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
        """For this process alone.

        Raises:
          OSError: there is no such folder.
        """
        return cls(folder, None if is_plain(folder) else _opened(folder, 3))

    @classmethod
    def of_all(cls, folder: Path) -> Self:
        """The same path on all processes, as orbax wants it where they save together.

        Raises:
          OSError: on all processes, if it cannot be opened on one.
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
        """An error of orbax's, which names the folder as the user does."""
        if self.path != self.folder and not isinstance(error, OSError):
            error.args = (str(error).replace(str(self.path), str(self.folder)),)
        return error

    def close(self) -> None:
        """The path is no longer used: its number may come to stand for another folder."""
        if self._number is not None:
            os.close(self._number)
            self._number = None


def _opened(folder: Path, least: int) -> int:
    """The number, `least` or more, of a folder that is open now."""
    first = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, least)
    finally:
        os.close(first)


# Orbax syncs the arrays, and none of the rest: not the index, not the mark of a commit, not the folders. Its last step
# renames the step's folder. A path of the class that is given here syncs all that is in the folder before, and the name
# after.


class Written:
    """What is known of the folders that orbax makes for one save.

    Attributes:
      named: the names that folders have got on the disk so far.
      failed: why a folder could not be made. Orbax hears of it at the rename: its threads would wait for the folder for
        minutes, in all processes, also when Python ends.
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
                """Renames a folder; where the disk cannot take it, the folder has its first name again."""
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
