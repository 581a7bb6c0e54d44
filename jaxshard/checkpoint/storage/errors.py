"""The errors of checkpoints, and retries of reads that fail."""

import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxshard.base.types import T
from jaxshard.system import small_files

_PAUSES = (0.1, 0.4, 1.5)  # seconds before each further try
_PASSING = frozenset(
    {errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EINTR, errno.ENOMEM, errno.EBUSY}
    | {errno.ETIMEDOUT, errno.ENOBUFS, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ECONNRESET}
)
_ABSENT = (FileNotFoundError, NotADirectoryError)
_MOST_BYTES = 2**28  # of an index, or of a list of arrays
_FILES_FREE = 32  # orbax opens that many at once

# Errors by which a decoder rejects its input, and the codes by which tensorstore reports bad data.
_REFUSALS = (ValueError, KeyError, TypeError, AttributeError, IndexError, EOFError, RecursionError)
_REFUSED = {"DATA_LOSS", "NOT_FOUND", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "OUT_OF_RANGE"}
_CODE = re.compile(
    r"\b(CANCELLED|UNKNOWN|INVALID_ARGUMENT|DEADLINE_EXCEEDED|NOT_FOUND|ALREADY_EXISTS|PERMISSION_DENIED|"
    r"RESOURCE_EXHAUSTED|FAILED_PRECONDITION|ABORTED|OUT_OF_RANGE|UNIMPLEMENTED|INTERNAL|UNAVAILABLE|DATA_LOSS|"
    r"UNAUTHENTICATED)\b"
)
_NUMBER = re.compile(r"os_error_code='(\d+)'|OS error (\d+)|\[Errno (\d+)\]")
_CURES = {
    "give this user permission to read it": (errno.EACCES, errno.EPERM),
    "raise the limit of open files (ulimit -n)": (errno.EMFILE, errno.ENFILE),
    "free memory, or restore a part of the tree (only=)": (errno.ENOMEM,),
}


class CorruptCheckpointError(RuntimeError):
    """A checkpoint is damaged: it differs from what was saved.

    Attributes:
      step: of the checkpoint; None: `from_bytes` raised it.
      leaf: the path of the first damaged leaf; None: unknown.
    """

    def __init__(self, step: int | None, leaf: str | None, reason: str):
        what = "these bytes are" if step is None else f"checkpoint {step} is"
        super().__init__(f"{what} corrupt: {leaf + ': ' if leaf else ''}{reason}")
        self.step, self.leaf = step, leaf

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy, which would give `__init__` the message alone."""
        return BaseException.__new__, (type(self), *self.args), self.__dict__


class NewerFormatError(ValueError):
    """A checkpoint has a format that only a newer jaxshard can read.

    Attributes:
      step: of the checkpoint; None: `from_bytes` raised it.
      found: its format's number.
    """

    def __init__(self, step: int | None, found: int, known: int):
        what = "these bytes have" if step is None else f"checkpoint {step} has"
        super().__init__(f"{what} format {found}, and this jaxshard reads formats up to {known}: update jaxshard")
        self.step, self.found = step, found

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy, which would give `__init__` the message alone."""
        return BaseException.__new__, (type(self), *self.args), self.__dict__


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 400 characters; the error's type, if it has no message.

    >>> first_line(ValueError("no such file\\nat line 3"))
    'no such file'
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0][:400]


def not_installed(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error for a package that checkpoints need, with the command that installs it."""
    return ModuleNotFoundError(f'{error}; install it with: pip install "jaxshard[checkpoint]"', name=error.name)


def not_saved(step: int, errors: dict[int, BaseException], path: Path) -> OSError:
    """The error of a save that failed with `errors` (process -> error): this process's own, else the first."""
    error = errors.get(jax.process_index()) or next(iter(errors.values()))
    text = first_line(error)
    if "No space left" in str(error) or getattr(error, "errno", None) == errno.ENOSPC:
        number, reason = errno.ENOSPC, "no space left on the disk"
    else:
        number, reason = getattr(error, "errno", None) or errno.EIO, "it could not be written"
    made = OSError(
        number, f"checkpoint {step} was not saved: {reason}; older checkpoints are intact ({text})", str(path)
    )
    made.__cause__ = error
    return made


# A read fails because of the file system or because the data are damaged. A checkpoint counts as corrupt only when that
# is proven: every file could be read, and the content is wrong. Any other failure is the file system's: it is retried
# if that can help, then raised as an OSError.


def patiently(call: Callable[[], T]) -> T:
    """Calls `call`, again for 2 s in all if an error of the file system may be temporary; returns its result."""
    for pause in _PAUSES:
        try:
            return call()
        except OSError as error:
            if error.errno not in _PASSING:
                raise
        time.sleep(pause)
    return call()


def read_description(path: Path) -> bytes:
    """Reads a file that describes a step's arrays, at most 256 MiB; never blocks on a pipe.

    Raises:
      OSError: the file system refuses to read it.
      ValueError: it is larger than 256 MiB.
    """
    try:
        return patiently(lambda: small_files.read(path, _MOST_BYTES))
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise ValueError(f"{path.name} has more than {_MOST_BYTES:,} bytes") from error
        raise


def mode_of(path: Path) -> int:
    """The `st_mode` of a path; 0: it does not exist.

    Raises:
      OSError: the file system refuses to look.
    """
    try:
        return patiently(lambda: os.stat(path).st_mode)
    except _ABSENT:
        return 0
    except OSError as error:
        raise system_error("a checkpoint", error, path) from error


def is_file(path: Path) -> bool:
    """Whether the path is a file; raises as `mode_of`."""
    return stat.S_ISREG(mode_of(path))


def is_folder(path: Path) -> bool:
    """Whether the path is a folder; raises as `mode_of`."""
    return stat.S_ISDIR(mode_of(path))


def system_error(what: str, error: BaseException, path: Path) -> OSError:
    """The OSError for a file that the system refuses to read: its errno, the path and the cure."""
    number = _number(error) or errno.EIO
    cure = next((cure for cure, numbers in _CURES.items() if number in numbers), "check the disk or its mount")
    named = getattr(error, "filename", None) or _file_in(error, path) or str(path)
    why = os.strerror(number) if _number(error) else first_line(error)
    return OSError(
        number,
        f"{what} cannot be read: {why}; {cure}, and try again. No older checkpoint was used, nothing was renamed",
        named,
    )


def _file_in(error: BaseException, folder: Path) -> str | None:
    """The file in the folder that tensorstore's message names last."""
    found = re.findall(rf'"({re.escape(str(folder))}/[^"]*[^"/\\])\\?"', str(error))
    return found[-1] if found else None


def _number(error: BaseException) -> int | None:
    """The errno of an error; tensorstore puts it into its message."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    if found := _NUMBER.search(str(error)):
        return int(next(filter(None, found.groups())))
    return errno.ENOMEM if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error) else None


def proven(step: int, folder: Path, read: Callable[[], T]) -> T:
    """Calls `read`, and again after a failure, at most three times; returns its result.

    Args:
      step: of the checkpoint.
      folder: of the step.
      read: reads some of the step's arrays.

    Raises:
      CorruptCheckpointError: `read` rejected the data twice, and every file of the step could be read in between.
      OSError: the file system refuses to read the step.
    """
    was_refused, failure = False, Exception()
    for pause in (*_PAUSES, None):
        try:
            return read()
        except Exception as error:
            failure = error
        if not _is_refusal(failure):
            was_refused = False
            if pause is None or _number(failure) not in _PASSING | {None}:
                break
        elif was_refused:
            raise CorruptCheckpointError(step, None, f"it cannot be read: {first_line(failure)}") from failure
        else:
            was_refused = True
            read_through(f"checkpoint {step}", folder)
        time.sleep(pause or 0)
    raise system_error(f"checkpoint {step}", failure, folder) from failure


def _is_refusal(error: BaseException) -> bool:
    """Whether an error reports bad data; any other error is taken for the file system's."""
    number = _number(error)
    if number is not None:
        return number in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
    codes = set(_CODE.findall(str(error)))
    return codes <= _REFUSED if codes else isinstance(error, _REFUSALS)


def read_through(what: str, folder: Path) -> None:
    """Reads every file in a folder to its end.

    Raises:
      OSError: the file system refuses, although the file exists.
    """
    for path in files_in(folder):
        try:
            if is_file(path):  # not a pipe, which may never end
                patiently(lambda path=path: small_files.read_through(path))
        except _ABSENT:
            continue
        except OSError as error:
            raise system_error(what, error, path) from error


def check_files_free() -> None:
    """Raises OSError if this process or the system can open few more files: orbax would leave event loops open."""
    numbers = list[int]()
    try:
        while len(numbers) < _FILES_FREE:
            numbers.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        raise OSError(error.errno, error.strerror) from None  # it is not about this file
    finally:
        for number in numbers:
            os.close(number)


def files_in(folder: Path) -> Iterator[Path]:
    """Everything but folders, in a folder and below it; follows links, and visits each folder once.

    Raises:
      OSError: a folder cannot be listed, although it exists.
    """
    left, seen = [folder], set[tuple[int, int]]()
    while left:
        place = left.pop()
        for path in sorted(_listed(place, seen)):
            mode = mode_of(path)
            if stat.S_ISDIR(mode):
                left.append(path)
            elif mode:
                yield path


def _listed(folder: Path, seen: set[tuple[int, int]]) -> list[Path]:
    try:
        found = patiently(lambda: os.stat(folder))
        if (found.st_dev, found.st_ino) in seen:
            return []
        seen.add((found.st_dev, found.st_ino))
        return [folder / name for name in patiently(lambda: os.listdir(folder))]
    except _ABSENT:
        return []
    except OSError as error:
        raise system_error("a checkpoint", error, folder) from error
