"""A lock on a folder of checkpoints: one run at a time writes there."""

import errno
import json
import os
import re
import socket
import uuid
from pathlib import Path

import filelock

from jaxshard.system import files, small_files

_ID = re.compile("[0-9a-f]{32}")
_MOST_BYTES = 2**16  # of `run.json`


class Lock:
    """Holds a folder's lock; the operating system frees it when the process ends.

    Attributes:
      run: the id in `run.json`, made by the first run that wrote here: 32 hex digits.

    Args:
      path: the folder.
      run: the id to use if `run.json` has none; None: make one.

    Raises:
      OSError: another run holds the lock.
    """

    def __init__(self, path: Path, run: str | None = None):
        self._path, self._notes = path / ".lock", path / "run.json"
        self._lock = filelock.FileLock(self._path)
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            writer, cure = self._noted().get("writer", ""), "end it"
            if not writer:  # it has only begun
                writer, cure = "another Checkpointer, perhaps in this program,", "close() it, or end its program"
            elif writer == _this_process():
                writer, cure = f"this program ({writer})", "close() its other Checkpointer first"
            raise OSError(
                errno.EBUSY,
                f"{writer} is writing checkpoints here; {cure}, or give each run its own folder",
                str(path),
            ) from None
        self._file = _identity(self._path)
        noted = self._noted().get("id", "")
        self.run: str = noted if _ID.fullmatch(noted) else run or uuid.uuid4().hex
        self.note()

    def note(self) -> None:
        """Writes this run's id and process to `run.json`; a full disk leaves the old file."""
        text = json.dumps({"id": self.run, "writer": _this_process()})
        files.replace(self._notes, text)

    def is_noted(self) -> bool:
        """Whether `run.json` exists."""
        return self._notes.exists()

    def _noted(self) -> dict[str, str]:
        try:
            found = small_files.read_json(self._notes, _MOST_BYTES)
        except (OSError, ValueError):
            return {}
        return {name: str(value) for name, value in found.items()} if isinstance(found, dict) else {}

    def is_held(self) -> bool:
        """Whether the locked file is still the folder's `.lock`, so that no other run can take the lock."""
        return self._file is not None and _identity(self._path) == self._file

    def release(self) -> None:
        self._lock.release()


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _identity(path: Path) -> tuple[int, int] | None:
    """(device, inode), which identifies an open file; None: the file does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
