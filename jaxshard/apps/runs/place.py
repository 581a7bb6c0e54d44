"""Guards a run's folder while it trains: it, or files in it, may be moved, deleted or replaced."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

from jaxshard.apps.runs.folder_watch import FolderWatch
from jaxshard.apps.runs.run_folder import RunFolder
from jaxshard.checkpoint import Checkpointer, CorruptCheckpointError, NewerFormatError
from jaxshard.system.text import printable


class Place:
    """A run's folder, held open while the run writes there. Only process 0 uses it.

    Args:
      folder: of the run; its `model` must exist.
      run: the id of its saves.
      complete: writes the run's files that are missing in a folder, except saves and metrics; returns notes to print.
    """

    def __init__(self, folder: RunFolder, run: str, complete: Callable[[RunFolder], list[str]]):
        self._folder, self._run, self._complete = folder, run, complete
        self._watch, self._model = FolderWatch(folder.path), FolderWatch(folder.model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.close()
        self._model.close()

    def moved(self) -> tuple[str, str | None] | None:
        """None, or (why the run can no longer be saved in its folder, the folder's new path or None)."""
        path, where = self._folder.path, self._watch.where()
        if where != path:
            now = f"it is now {where}" if where else "it was deleted or unmounted"
            why = f"--out {path} is no longer the folder that the run started in: {now}"
            return printable(why), str(where) if where else None
        if self._model.where() != self._folder.model and self._has_others():
            return printable(f"{self._folder.model} was replaced, and does not belong to this run"), None
        return None

    def made_elsewhere(self, where: str | None) -> str:
        """Completes the folder `where` or, for None, a new one, at --out if nothing is there, else beside it. Returns
        its path.

        Raises:
          OSError: it cannot be written to.
        """
        path = Path(where) if where else self._made()
        self._complete(RunFolder(path))
        return str(path)

    def _made(self) -> Path:
        path = self._folder.path
        path.parent.mkdir(parents=True, exist_ok=True)
        others = (path.with_name(f"{path.name}.rescued{number or ''}") for number in itertools.count())
        for each in itertools.chain([path], others):
            if not os.path.lexists(each):
                each.mkdir()
                return each
        raise AssertionError("every name is taken")

    def completed(self) -> list[str]:
        """Writes missing files if the folder is still at its path; returns notes to print."""
        notes = [] if self._model.where() == self._folder.model else self._made_anew()
        try:
            notes += self._complete(self._folder)
        except OSError as error:
            notes.append(f"{self._folder.path} is incomplete, and cannot be completed: {error}")
        return [printable(note) for note in notes]

    def _has_others(self) -> bool:
        """Whether `model` is not a folder, or has a different run's saves."""
        model = self._folder.model
        if os.path.lexists(model) and not model.is_dir():
            return True
        saves = Checkpointer(model)
        try:
            return any(saves.info(step)["run"] != self._run for step in saves.steps())
        except (CorruptCheckpointError, NewerFormatError, OSError):
            return True

    def _made_anew(self) -> list[str]:
        model = self._folder.model
        try:
            model.mkdir(exist_ok=True)
            watch = FolderWatch(model)
        except OSError:  # the save reports it
            return []
        self._model.close()
        self._model = watch
        return [f"{model} was moved, deleted or replaced: earlier saves may be lost"]
