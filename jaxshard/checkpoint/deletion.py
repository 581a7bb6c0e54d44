"""Deletes folders in a thread, so that nothing waits for it. What is not deleted when the process ends, stays."""

import collections
import contextlib
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path


class Deletion:
    """Folders that are being deleted, one after the other; of a link the link alone."""

    def __init__(self):
        self._left = collections.deque[Path]()
        self._errors: list[str] = []
        self._lock, self._idle = threading.Lock(), threading.Event()
        self._idle.set()

    def begin(self, folders: Iterable[Path]) -> None:
        """Has these deleted, too."""
        with self._lock:
            self._left.extend(folders)
            if self._left and self._idle.is_set():
                self._idle.clear()
                threading.Thread(target=self._run, name="jaxshard deletes old checkpoints", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Waits until all are deleted, but not longer; returns whether they are."""
        return self._idle.wait(seconds)

    def errors(self) -> list[str]:
        """Why folders could not be deleted, since this was last asked."""
        with self._lock:
            found, self._errors = self._errors, []
        return found

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._left:
                    self._idle.set()
                    return
                folder = self._left.popleft()
            try:
                with contextlib.suppress(FileNotFoundError):  # the next run that writes here deletes it, too
                    if folder.is_symlink() or folder.is_file():
                        folder.unlink()
                    else:
                        shutil.rmtree(folder)
            except OSError as error:
                with self._lock:
                    self._errors.append(str(error))
