"""Paths that orbax is given, so that a step is on the disk before it gets its name.

Orbax syncs the arrays, and none of the rest: not the index, not the mark of a commit, not the folders. Its last step
renames the step's folder. A path of the class that is given here syncs all that is in the folder before, and the name
after.
"""

import contextlib
import os
from pathlib import Path
from typing import Any

from etils.epath.gpath import PosixGPath

from jaxshard.system import files


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
