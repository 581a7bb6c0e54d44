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
    """Holds the lock of a folder; the system frees it when the process ends.

    Attributes:
      run: the id in `run.json`, which the first run that wrote here made: 32 hex digits.

    Args:
      path: the folder.
      run: the id where none is noted, or None to make one.

    Raises:
      OSError: another run has it.
    """

    def __init__(self, path: Path, run: str | None = None):
        self._path, self._notes = path / ".lock", path / "run.json"
        self._lock = filelock.FileLock(self._path)
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            writer = self._noted().get("writer", "another process")
            own = writer == _this_process()
            cure = "close() its other Checkpointer first" if own else "end it"
            writer = f"this program ({writer})" if own else writer
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
        """Writes down who writes here; a full disk leaves what was written before."""
        text = json.dumps({"id": self.run, "writer": _this_process()})
        files.replace(self._notes, text)

    def is_noted(self) -> bool:
        """Whether it is written down who writes here."""
        return self._notes.exists()

    def _noted(self) -> dict[str, str]:
        try:
            found = small_files.read_json(self._notes, _MOST_BYTES)
        except (OSError, ValueError):
            return {}
        return {name: str(value) for name, value in found.items()} if isinstance(found, dict) else {}

    def is_held(self) -> bool:
        """Whether the file that is locked is still the folder's `.lock`, so that no other run can lock it."""
        return self._file is not None and _identity(self._path) == self._file

    def release(self) -> None:
        """Lets other runs write in the folder."""
        self._lock.release()


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells a file from all others as long as it is open; None: it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
