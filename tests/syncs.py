"""Records syncs, renames and deletions, in order, as a substitute for cutting a disk's power."""

import os
import shutil
import stat

from jaxshard.system import files


class Recorder:
    """Records as `events`: ("sync", identity), ("rename", from, to), ("delete", path)."""

    def __init__(self, patch):
        self.events, self._fails = [], None
        sync, rename, replace, rmtree = files._sync, os.rename, os.replace, shutil.rmtree

        def synced(number):
            found = os.fstat(number)
            if self._fails is not None and self._fails[1](found.st_mode):
                raise OSError(self._fails[0], os.strerror(self._fails[0]))
            sync(number)
            self.events.append(("sync", (found.st_dev, found.st_ino)))

        def renamed(source, target, **options):
            self.events.append(("rename", os.fspath(source), os.fspath(target)))
            rename(source, target, **options)

        def replaced(source, target, **options):
            self.events.append(("rename", os.fspath(source), os.fspath(target)))
            replace(source, target, **options)

        def deleted(path, **options):
            self.events.append(("delete", os.fspath(path)))
            rmtree(path, **options)

        patch.setattr(files, "_sync", synced)
        patch.setattr(os, "rename", renamed)
        patch.setattr(os, "replace", replaced)
        patch.setattr(shutil, "rmtree", deleted)

    def fail(self, number, what=stat.S_ISREG):
        """From now on, syncs of files (or of folders) fail with this error."""
        self._fails = number, what

    def work(self):
        self._fails = None

    def synced(self):
        return {event[1] for event in self.events if event[0] == "sync"}

    @staticmethod
    def identity(path):
        found = os.stat(path)
        return found.st_dev, found.st_ino
