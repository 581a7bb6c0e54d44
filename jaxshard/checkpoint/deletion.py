"""Deletes folders in a thread, so that nothing waits for it. What is not deleted when the process ends, stays."""

import contextlib
import threading
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

from jaxshard.system import files


class Deletion:
    """Folders that are being deleted, one after the other; of a link the link alone.

    They were renamed just before. That is put on the disk first: a power cut must not leave half a step with its name.
    """

    def __init__(self):
        self._left = list[Path]()
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
                folders, self._left = self._left, []
            for folder in self._renamed_for_good(folders):
                with self._noted(), contextlib.suppress(FileNotFoundError):  # another run may delete it, too
                    files.delete(folder)

    def _renamed_for_good(self, folders: list[Path]) -> Iterator[Path]:
        """Those whose names are on the disk; the next run that writes here deletes the others."""
        for parent in {folder.parent for folder in folders}:
            with self._noted(), contextlib.suppress(FileNotFoundError):
                files.sync_folder(parent)
                yield from (folder for folder in folders if folder.parent == parent)

    @contextlib.contextmanager
    def _noted(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            with self._lock:
                self._errors.append(str(error))
