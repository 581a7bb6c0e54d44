"""The README's program runs as it stands, and its links lead somewhere."""

import pathlib
import re
import subprocess
import sys

from jaxshard.schedule import Plan, chart

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


def test_the_program_of_the_guide_to_parallelism_runs():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "parallelism.md").read_text(), re.S)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.1


def test_the_chart_in_the_guide_is_the_schedules():
    assert chart(Plan(4, 6), "1f1b") in (ROOT / "docs" / "parallelism.md").read_text()


def test_named_files_exist():
    for path in re.findall(r"`((?:configs|benchmarks|docs|notebooks)/[\w./]+)`", README):
        assert (ROOT / path).exists() or list(ROOT.glob(path + "*")), path
