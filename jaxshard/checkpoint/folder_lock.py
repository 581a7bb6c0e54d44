"""A lock on a folder of checkpoints: one run at a time writes there."""

import errno
import json
import os
import socket
import uuid
from pathlib import Path

import filelock


class Lock:
    """Holds the lock of a folder; the system frees it when the process ends.

    Attributes:
      run: the id in `run.json`, which the first run that wrote here made: 32 hex digits.

    Raises:
      OSError: another run has it.
    """

    def __init__(self, path: Path):
        self._lock, self._notes = filelock.FileLock(path / ".lock"), path / "run.json"
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            writer = self._noted().get("writer", "another process")
            raise OSError(
                errno.EBUSY, f"{writer} is writing checkpoints here; end it, or give each run its own folder", str(path)
            ) from None
        self.run: str = self._noted().get("id") or uuid.uuid4().hex
        writer = f"process {os.getpid()} on {socket.gethostname()}"
        self._notes.write_text(json.dumps({"id": self.run, "writer": writer}))

    def _noted(self) -> dict[str, str]:
        try:
            found = json.loads(self._notes.read_text())
        except (OSError, ValueError):
            return {}
        return {name: str(value) for name, value in found.items()} if isinstance(found, dict) else {}

    def is_there(self) -> bool:
        """Whether the folder still has `run.json`; False: the folder was deleted, and the lock with it."""
        return self._notes.exists()

    def release(self) -> None:
        """Lets other runs write in the folder."""
        self._lock.release()
