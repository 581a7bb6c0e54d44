"""A disk whose power can be cut: an ext4 in a file, if this user may mount one."""

import contextlib
import subprocess
import sys
from pathlib import Path

_SHUTDOWN = "import fcntl, os, struct; n = os.open({!r}, os.O_RDONLY); fcntl.ioctl(n, 0x8004587D, struct.pack('I', 2))"


class Disk:
    """An ext4 of 96 MB at `path`. A cut loses all data that were not synced, including the journal."""

    def __init__(self, folder: Path):
        self.path, self._file = folder / "disk", folder / "disk.ext4"
        self.path.mkdir()
        with self._file.open("wb") as file:
            file.truncate(96 * 2**20)
        _run("mkfs.ext4", "-q", "-F", self._file)
        self._mount()

    def _mount(self) -> None:
        _run("mount", "-o", "loop", self._file, self.path)

    def cut(self) -> None:
        """From now on nothing reaches the disk, and every call on it fails."""
        _run(sys.executable, "-c", f"{_SHUTDOWN.format(str(self.path))}; os._exit(0)")

    def start_again(self) -> None:
        """Mounts the disk again; no process may have a file open there."""
        self.close()
        self._mount()

    def close(self) -> None:
        _run("umount", self.path)


def _run(*command: object) -> None:
    subprocess.run(list(map(str, command)), check=True, capture_output=True)


@contextlib.contextmanager
def disk(folder):
    """A `Disk`, or None if this user may not mount one."""
    try:
        made = Disk(folder)
    except (subprocess.CalledProcessError, FileNotFoundError):
        made = None
    try:
        yield made
    finally:
        if made is not None:
            made.close()
