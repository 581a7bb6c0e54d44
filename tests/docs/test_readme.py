"""The README's program runs as it stands, and its links lead somewhere."""

import os
import pathlib
import re
import subprocess
import sys

from jaxshard.pipelining.timetable import Plan, chart

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_twenty_lines_run():
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "import jax" in block]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    loss, _ = map(float, done.stdout.splitlines()[0].split())
    assert loss < 0.5
    assert "w1" in done.stdout


def test_the_run_that_nothing_loses_runs(tmp_path):
    """Told to end within step 250, it has saved that; started again, it goes on from there to the end."""
    first, second = re.findall(r"```python\n(.*?)```", README, re.S)[1:3]
    told = "def next_batch(i):\n    if i == 249: os.kill(os.getpid(), 15)\n    return jaxshard.shard_batch(batch, opt)"
    again = "params, state = opt.place(jax.tree.map(np.zeros_like, params)), opt.init(params)"
    code = "\n".join(["import os", first, told, second, "print('saved', i)", again, second, "print('ended', i)"])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["saved 250", "ended 1000"]


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


def test_the_plan_in_the_docs_runs():
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "plan.md").read_text(), re.S))
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[:5]] == ["ddp", "zero1", "zero2", "zero3", "hsdp"]
    assert "is the fastest that fits" in done.stdout
