"""One run writes in a folder."""

import errno
import json
import os
import socket
import uuid
from pathlib import Path

import filelock


class Lock:
    """This process's right to write in a folder, which the system takes back when the process ends.

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
        return self._notes.exists()

    def release(self) -> None:
        self._lock.release()
