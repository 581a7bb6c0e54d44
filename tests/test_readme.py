"""The README's program runs as it stands, and its links lead somewhere."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_twenty_lines_run():
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "import jax" in block]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    loss, _ = map(float, done.stdout.splitlines()[0].split())
    assert loss < 0.5
    assert "w1" in done.stdout


def test_named_files_exist():
    for path in re.findall(r"`((?:configs|benchmarks|docs|notebooks)/[\w./]+)`", README):
        assert (ROOT / path).exists() or list(ROOT.glob(path + "*")), path
