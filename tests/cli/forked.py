"""Runs many commands, each in a process forked after all imports; returns output, memory, time and files."""

import contextlib
import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path


@dataclasses.dataclass
class Ended:
    """The end of a command. `status`: None if its time was up; `peak`: bytes of memory beyond the imports."""

    status: int | None
    out: str
    err: str
    seconds: float
    peak: int


class Commands:
    """Runs commands, one after the other; a context.

    `stubbed`: functions of jaxshard.cli that do nothing and return 0.
    """

    def __init__(self, *stubbed, **variables):
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", **variables}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
        self._server = subprocess.Popen([sys.executable, __file__, *stubbed], **pipes)
        assert self._server.stdout.readline() == "ready\n"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.stdin.close()
        self._server.wait(60)
        self._server.stdout.close()

    def run(self, words, where, seconds=30):
        """Runs `jaxshard` with these words in the folder `where`."""
        self._server.stdin.write(json.dumps([[str(word) for word in words], str(where), seconds]) + "\n")
        self._server.stdin.flush()
        return Ended(**json.loads(self._server.stdout.readline()))


def listing(folder):
    """All entries of a folder, with kinds, sizes and times."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        stat = path.lstat()
        found[str(path.relative_to(folder))] = (stat.st_mode, path.is_dir() or (stat.st_size, stat.st_mtime_ns))
    return found


def _serve():
    import importlib

    from jaxshard.cli import COMMANDS

    for name in (*COMMANDS.values(), "jaxshard.plan.pages.drawing"):
        importlib.import_module(name)
    for name in ("tokenizers", "jaxshard.apps.bench.nnx_peer"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for name in sys.argv[1:]:
        module, _, function = name.partition(".")
        setattr(sys.modules[COMMANDS[module]], function, lambda *_: 0)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(_forked(*json.loads(line))), flush=True)


def _forked(words, where, seconds):
    with tempfile.TemporaryFile() as out_file, tempfile.TemporaryFile() as err_file:
        streams = [out_file.fileno(), err_file.fileno()]
        start = time.monotonic()
        child = os.fork()
        if not child:
            _run(words, where, streams)
        status, usage = _waited(child, start + seconds)
        took = time.monotonic() - start
        out, err = (os.pread(stream, 2**20, 0).decode(errors="replace") for stream in streams)
    unit = 1 if sys.platform == "darwin" else 1024
    peak = (usage.ru_maxrss - resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit
    return {"status": status, "out": out, "err": err, "seconds": took, "peak": max(0, peak)}


def _run(words, where, streams):
    from jaxshard.cli import main

    status = 70
    try:
        os.setpgid(0, 0)
        os.chdir(where)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, stream in enumerate((nothing, *streams)):
            os.dup2(stream, number)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        status = main(words)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _waited(child, end):
    """(exit status or, if time was up, None; resource usage)."""
    late, found = False, (0, 0, None)
    while not found[0]:
        late = late or time.monotonic() > end
        if late:
            os.killpg(child, signal.SIGKILL)
        found = os.wait4(child, 0 if late else os.WNOHANG)
        time.sleep(0 if found[0] else 0.01)
    return (None if late else os.waitstatus_to_exitcode(found[1])), found[2]


if __name__ == "__main__":
    _serve()
