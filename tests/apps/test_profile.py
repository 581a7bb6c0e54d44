"""A profile is of the steps that were asked for, of each process its own."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from compiled_once import fast_flags

from jaxshard.apps.records import profile
from jaxshard.apps.records.profile import Profile, steps_in
from jaxshard.cli import main

ROOT = Path(__file__).parents[2]
TINY = ["--model.layers", "1", "--model.width", "16", "--model.heads", "1", "--model.hidden", "16"]
TINY += [
    "--model.sequence-length",
    "16",
    "--train.steps",
    "6",
    "--train.eval-every",
    "2",
    "--data.heldout-bytes",
    "700",
]
TINY += ["--optimizer.warmup-steps", "1", "--sharding.devices", "2"]


def traced(folder):
    """The steps in the one trace of a folder."""
    assert len(list(folder.rglob("*.xplane.pb"))) == 1
    (path,) = folder.rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return sorted({int(e["args"]["step_num"]) for e in events if e.get("name") == "train" and "step_num" in e["args"]})


def ended(*options, **variables):
    """`jaxshard train` in a process of its own: JAX's profiler crashes where libtpu has been loaded."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "COLUMNS"))}
    kept |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": fast_flags()} | variables
    command = [sys.executable, "-m", "jaxshard", "train", *options]
    return subprocess.run(command, env=kept, timeout=300, capture_output=True, text=True, check=False)


def trained(*options):
    """What it prints."""
    done = ended(*options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_has_these_steps_alone_and_counts_those_of_its_process(tmp_path):
    run = tmp_path / "my run"
    printed = trained(*TINY, "--out", str(run), "--profile", "1:3")
    assert traced(run / "profile") == [1, 2]
    assert f"a profile of 2 steps: xprof --logdir '{run}/profile'" in printed.replace("\n", " ")
    (run / "profile").rename(tmp_path / "earlier")
    trained("--resume", "--out", str(run), "--train.steps", "8", "--profile", "0:2")
    assert traced(run / "profile") == [6, 7]


def test_each_of_several_processes_writes_its_own(tmp_path):
    trained(*TINY, "--out", str(tmp_path / "run"), "--processes", "2", "--profile", "2:3")
    for index in range(2):
        assert traced(tmp_path / "run" / "profile" / f"process_{index}") == [2]


def test_beside_a_libtpu_without_a_tpu_it_is_refused_and_works_on_the_cpu_alone(tmp_path):
    """It crashed there, in the middle of a training."""
    (compilers,) = {path for path in sys.path if Path(path, "libtpu").is_dir()}
    beside = {"PYTHONPATH": f"{ROOT}{os.pathsep}{compilers}"}
    done = ended(*TINY, "--out", str(tmp_path / "run"), "--profile", "1:2", **beside, JAX_PLATFORMS="")
    assert done.returncode == 2
    assert "set JAX_PLATFORMS=cpu" in done.stderr.replace("\n", " ")
    assert not (tmp_path / "run").exists()
    assert ended(*TINY, "--out", str(tmp_path / "run"), "--profile", "1:2", **beside).returncode == 0
    assert traced(tmp_path / "run" / "profile") == [1]


WRONG = {
    "10": "--profile '10': it must be FROM:TO, as in --profile 10:15",
    "a:b": "it must be FROM:TO",
    "-1:3": "it must be FROM:TO",
    "1:2:3": "it must be FROM:TO",
    "١:٣": "it must be FROM:TO",
    "3:3": "--profile 3:3 covers no step: TO must be above FROM, as in 3:8",
    "4:2": "--profile 4:2 covers no step",
    "5:7": "--profile 5:7: this process runs 6 steps: TO must be at most 6",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_range_that_cannot_be_is_told_before_anything_is_done(tmp_path, capsys, words):
    assert main(["train", *TINY, "--out", str(tmp_path / "run"), f"--profile={words}"]) == 2
    printed = capsys.readouterr()
    assert WRONG[words] in printed.err
    assert (printed.out, printed.err.count("\n"), list(tmp_path.iterdir())) == ("", 1, [])


def test_a_resumed_process_has_fewer_steps(monkeypatch):
    monkeypatch.setattr(profile, "_would_crash", lambda: False)  # another test of this process may have loaded libtpu
    with pytest.raises(ValueError, match="this process runs 2 steps"):
        profile.check(steps_in("0:3"), 2)
    profile.check(steps_in("0:2"), 2)


def test_what_keeps_it_from_being_written_is_told_and_stops_nothing(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise OSError("the disk is full")

    told = []
    monkeypatch.setattr("jax.profiler.stop_trace", fails)
    monkeypatch.setattr("jax.profiler.start_trace", lambda *_, **__: None)
    with Profile(range(1), tmp_path, told.append) as traced:
        traced.before(())
        traced.after(())
    with Profile(range(3, 5), tmp_path, told.append) as traced:
        traced.before(())
        traced.after(())
    with Profile(range(0), tmp_path, told.append) as traced:
        traced.before(())
    assert told == [
        f"{tmp_path}: no profile was written: the disk is full",
        "no profile was written: the run ended after 1 steps of this process",
    ]
