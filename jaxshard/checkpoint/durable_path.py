"""Paths that orbax is given, so that a step is on the disk before it gets its name.

Orbax syncs the arrays, and none of the rest: not the index, not the mark of a commit, not the folders. Its last step
renames the step's folder. A path of the class that is given here syncs all that is in the folder before, and the name
after.
"""

import contextlib
import os
from pathlib import Path

from etils.epath.gpath import PosixGPath

from jaxshard.base import files


def durable_paths() -> tuple[type[PosixGPath], list[str]]:
    """A class of paths for one save, and the names that folders have got on the disk by it so far."""
    renamed: list[str] = []

    class DurablePath(PosixGPath):
        def rename(self, target: str | os.PathLike[str]) -> "DurablePath":
            """Renames a folder; where the disk cannot take it, the folder has its first name again."""
            source, named = Path(self), Path(target)
            files.sync_tree(source)
            source.rename(named)
            try:
                files.sync_folder(named.parent)
            except OSError:
                with contextlib.suppress(OSError):
                    named.rename(source)
                raise
            renamed.append(named.name)
            return type(self)(target)

    return DurablePath, renamed
