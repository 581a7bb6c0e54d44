"""Metrics in wandb and trackio: each record once, in the run that took its step, and never in the run's way."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import tensorboardX.proto.event_pb2 as events
from compiled_once import fast_flags

from jaxshard.apps.config.config import Config, TrainConfig
from jaxshard.apps.records.record import Recorder, loggers
from jaxshard.apps.records.trackers import Before
from jaxshard.apps.runs.run_folder import RunFolder
from jaxshard.apps.trainer.build import Run
from jaxshard.cli import main

ROOT = Path(__file__).parents[2]
TINY = ["--model.layers", "1", "--model.width", "16", "--model.heads", "1", "--model.hidden", "16"]
TINY += ["--model.sequence-length", "16", "--train.steps", "6", "--train.log-every", "2", "--train.eval-every", "3"]
TINY += ["--data.heldout-bytes", "700", "--optimizer.warmup-steps", "1", "--sharding.devices", "2"]
BOTH = ["--train.log-to", "wandb", "trackio"]
FAKE = """
import json, os

class Settings:  # wandb's
    mode = os.environ.get("TRACKER_MODE", "offline")
    def __init__(self, *, console, finish_timeout, finish_timeout_raises):
        pass

class Run:
    def __init__(self, given):
        self.given = given
        self.told("init", given)

    def told(self, *call):
        if os.environ.get("TRACKER_FAILS") == call[0]:
            raise ConnectionError("no \\x1b[2Jnetwork")
        with open(os.environ["TRACKER_CALLS"], "a") as file:
            file.write(json.dumps([__name__, os.environ.get("JAX_PROCESS_ID", "0"), *call]) + chr(10))

    def log(self, data, step=None):
        self.told("log", data, step)

    def finish(self):
        self.told("finish")

if __name__ == "wandb":
    def setup():
        return type("Setup", (), {"settings": Settings})

    def login(*, prompt, verify):
        return False

    def init(*, project, name, id, dir, config, allow_val_change, resume, settings):
        return Run(dict(project=project, name=name, id=id, dir=dir, config=config, resume=resume))
else:
    def init(project, name, config, resume, embed):
        return Run(dict(project=project, name=name, id=name[-8:], config=config, resume=resume))
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """wandb and trackio whose calls are kept; returns those of one of them: (function, arguments)."""
    for name in ("wandb", "trackio"):
        (tmp_path / "fakes").mkdir(exist_ok=True)
        (tmp_path / "fakes" / f"{name}.py").write_text(FAKE)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path / "fakes")
    monkeypatch.setenv("TRACKER_CALLS", str(tmp_path / "calls"))

    def of(name):
        found = map(json.loads, (tmp_path / "calls").read_text().splitlines())
        return [(process, *call) for module, process, *call in found if module == name]

    yield of
    for name in ("wandb", "trackio"):
        sys.modules.pop(name, None)


def records(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def logged(calls, since=0):
    """The records of the last run that began, as metrics.jsonl has them."""
    last = max(i for i, call in enumerate(calls) if call[1] == "init")
    return [{"step": step, **data} for _, name, data, step in (c for c in calls[max(last, since) :] if c[1] == "log")]


def ids(calls):
    return [call[2]["id"] for call in calls if call[1] == "init"]


def killed_at(monkeypatch, step):
    """The process ends before the batch after `step` steps is made."""

    def die():
        raise KeyboardInterrupt

    make = Run.batch
    monkeypatch.setattr(Run, "batch", lambda run, index: die() if index == step else make(run, index))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_records_and_options_go_there_and_a_resumed_run_goes_on(tmp_path, calls, name):
    run = tmp_path / "my run"
    assert main(["train", *TINY, *BOTH, "--out", str(run)]) == 0
    assert not (run / "tensorboard").exists()
    ((_, _, given),) = (call for call in calls(name) if call[1] == "init")
    assert given["config"]["model"]["width"] == 16
    assert given["project"] == "jaxshard"
    assert given["name"].startswith("my run")
    assert given["resume"] == "allow"
    assert logged(calls(name)) == records(run)
    assert calls(name)[-1] == ("0", "finish")
    before = len(calls(name))
    assert main(["train", "--resume", "--out", str(run), "--train.steps", "8"]) == 0
    assert len(set(ids(calls(name)))) == 1
    assert [r for r in records(run) if r["step"] > 6] == logged(calls(name), before)
    assert id_free(run / "config.toml", ids(calls(name)))


def id_free(path, ids):
    return not any(id in path.read_text() for id in ids)


@pytest.mark.parametrize("change", [[], ["--optimizer.learning-rate", "1e-3"]], ids=["as it was", "with other options"])
def test_steps_of_a_killed_process_are_there_once(tmp_path, calls, monkeypatch, change):
    """They come again as they were; with other options they are other steps, and another run has them."""
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        killed_at(patch, 5)
        options = [*TINY, *BOTH, "--train.log-every", "1", "--train.save-every", "2", "--train.eval-every", "2"]
        assert main(["train", *options, "--out", str(run)]) == 130
    assert [record["step"] for record in records(run)] == [1, 2, 2, 3, 4, 4]
    (run / "model" / "4").rename(tmp_path / "lost")
    before = {name: calls(name) for name in ("wandb", "trackio")}
    assert main(["train", "--resume", "--out", str(run), *change]) == 0
    for name, old in before.items():
        new = calls(name)
        assert (len(set(ids(new))) == 2) == bool(change)
        found = logged(new) if change else [*logged(old), *logged(new, len(old))]
        assert [(r["step"], sorted(r)) for r in found] == [(r["step"], sorted(r)) for r in records(run)]
        losses = [[r.get("loss", r.get("heldout_loss")) for r in some] for some in (found, records(run))]
        assert losses[0] == losses[1]


def test_going_back_begins_another_run_with_what_came_before(tmp_path, calls):
    folder, config = RunFolder(tmp_path / "run"), Config(train=TrainConfig(log_to=("tensorboard", "wandb", "trackio")))
    folder.begin("", 0)
    told = []
    with Recorder(loggers(folder, config, Before(0), told.append), told.append) as recorder:
        for step in (1, 2, 3):
            recorder.write(step, {"loss": 1.0 / step})
        recorder.rewind(1)
        recorder.write(2, {"loss": 9.0})
    kept = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 9.0}]
    assert records(folder.path) == kept
    assert len(list(folder.tensorboard.iterdir())) == 2
    for name in ("wandb", "trackio"):
        first, second = ids(calls(name))
        assert first != second
        assert logged(calls(name)) == kept
        assert [call[1] for call in calls(name)].count("finish") == 2
        assert json.loads(folder.trackers.read_text())[name] == second
    assert told == []


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_told_once_and_stops_nothing(tmp_path, calls, monkeypatch, capsys, call):
    monkeypatch.setenv("TRACKER_FAILS", call)
    run = tmp_path / "run"
    assert main(["train", *TINY, *BOTH, "--out", str(run)]) == 0
    out = capsys.readouterr().out
    for name in ("wandb", "trackio"):
        words = f"{name} lacks metrics from here on (ConnectionError: no \\x1b[2Jnetwork); the run goes on"
        assert out.count(words) == 1
    assert [record["step"] for record in records(run)] == [2, 3, 4, 6, 6]
    monkeypatch.delenv("TRACKER_FAILS")
    assert main(["train", "--resume", "--out", str(run), "--train.steps", "8"]) == 0
    assert [r["step"] for r in logged(calls("wandb"))][-2:] == [8, 8]


def test_only_the_first_of_several_processes_logs(tmp_path, calls):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "COLUMNS"))}
    kept |= {"PYTHONPATH": f"{tmp_path / 'fakes'}:{ROOT}", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": fast_flags()}
    command = [
        sys.executable,
        "-m",
        "jaxshard",
        "train",
        *TINY,
        *BOTH,
        "--out",
        str(tmp_path / "run"),
        "--processes",
        "2",
    ]
    subprocess.run(command, env=kept, check=True, timeout=300, capture_output=True)
    for name in ("wandb", "trackio"):
        assert {call[0] for call in calls(name)} == {"0"}
        assert logged(calls(name)) == records(tmp_path / "run")


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b'{"wandb": 3}', b'{"wandb": "../../x"}', b"[" * 10**5])
def test_a_damaged_file_of_names_begins_another_run(tmp_path, calls, content):
    folder, config = RunFolder(tmp_path / "run"), Config(train=TrainConfig(log_to=("wandb",)))
    folder.begin("", 0)
    folder.trackers.write_bytes(content)
    folder.metrics.write_text('{"step": 1, "loss": 2.0}\n')
    with Recorder(loggers(folder, config, Before(1), pytest.fail), pytest.fail) as recorder:
        recorder.write(2, {"loss": 1.0})
    assert logged(calls("wandb")) == records(folder.path)
    assert len(records(folder.path)) == 2


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_told_before_anything_is_done(tmp_path, monkeypatch, capsys, name):
    monkeypatch.setitem(sys.modules, name, None)
    assert main(["train", *TINY, "--train.log-to", "tensorboard", name, "--out", str(tmp_path / "run")]) == 2
    printed = capsys.readouterr()
    assert f"train.log_to has {name}, which cannot be imported" in printed.err
    assert f'pip install "jaxshard[{name}]"' in printed.err
    assert (printed.out, list(tmp_path.iterdir())) == ("", [])


def test_wandb_without_a_key_is_told_before_anything_is_done(tmp_path, calls, monkeypatch, capsys):
    """It would ask for one, in the middle of the progress bar."""
    monkeypatch.setenv("TRACKER_MODE", "online")
    assert main(["train", *TINY, *BOTH, "--out", str(tmp_path / "run")]) == 2
    assert "but no API key is set: run `wandb login`, or set WANDB_MODE=offline" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_metrics_may_go_nowhere_else(tmp_path):
    run = tmp_path / "run"
    assert main(["train", *TINY, "--out", str(run), "--train.log-to"]) == 0
    assert not (run / "tensorboard").exists()
    assert [record["step"] for record in records(run)] == [2, 3, 4, 6, 6]


# The packages themselves, where they are installed.


def test_the_real_wandb_takes_a_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tmp_path / "run"
    assert main(["train", *TINY, "--train.log-to", "wandb", "--out", str(run)]) == 0
    (folder,) = run.glob("wandb/offline-run-*")
    id = json.loads((run / "trackers.json").read_text())["wandb"]
    assert folder.name.endswith(id)
    content = (folder / f"run-{id}.wandb").read_bytes()
    assert b"heldout_bits_per_byte" in content
    assert b"sequence_length" in content
    assert main(["train", "--resume", "--out", str(run), "--train.steps", "8"]) == 0
    assert {path.name[-8:] for path in run.glob("wandb/offline-run-*")} == {id}
    assert "lacks metrics" not in capsys.readouterr().out


def test_the_real_trackio_takes_a_run(tmp_path):
    pytest.importorskip("trackio")
    run, environment = (
        tmp_path / "run",
        os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": str(ROOT)},
    )
    train = [sys.executable, "-m", "jaxshard", "train"]
    for words in ([*TINY, "--train.log-to", "trackio"], ["--resume", "--train.steps", "8"]):
        done = subprocess.run([*train, *words, "--out", str(run)], env=environment, capture_output=True, text=True)
        assert (done.returncode, "lacks metrics" in done.stdout) == (0, False), done.stderr
    id = json.loads((run / "trackers.json").read_text())["trackio"]
    told = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as s; print(json.dumps(s.get_logs('jaxshard', "
    )
    asked = [sys.executable, "-c", f"{told}'run-{id}')))"]
    found = json.loads(subprocess.run(asked, env=environment, capture_output=True, text=True, check=True).stdout)
    for record in found:
        del record["timestamp"]
    assert found == records(run)


def test_tensorboard_has_metrics_in_groups_and_the_sample_as_text(tmp_path):
    folder, told = RunFolder(tmp_path), []
    makers = loggers(folder, Config(), Before(0), told.append)
    with Recorder(makers, told.append) as recorder:
        recorder.write(1, {"loss": 2.5, "learning_rate": 1e-3, "tokens_per_second": 9.0})
        recorder.write(1, {"heldout_loss": 3.5, "heldout_bits_per_byte": 5.0})
        recorder.text(1, "sample", "O <b>\n    Romeo")
    assert told == []
    found = {value.tag: value for event in events_in(folder.tensorboard) for value in event.summary.value}
    assert found.keys() == {
        *("train/loss", "train/learning_rate", "speed/tokens_per_second", "heldout/loss", "heldout/bits_per_byte"),
        "sample/text_summary",
    }
    assert found["heldout/loss"].simple_value == 3.5
    text = found["sample/text_summary"]
    assert text.tensor.string_val == [b"    O <b>\n        Romeo"]  # indented: Markdown shows it as it is
    assert text.metadata.plugin_data.plugin_name == "text"
    assert [json.loads(line).keys() for line in folder.metrics.read_text().splitlines()] == [
        {"step", "loss", "learning_rate", "tokens_per_second"},
        {"step", "heldout_loss", "heldout_bits_per_byte"},
    ]


def events_in(folder):
    """The events of a folder, whose files are lengths, checksums and messages."""
    for file in sorted(folder.iterdir()):
        content, place = file.read_bytes(), 0
        while place < len(content):
            (size,) = struct.unpack_from("<Q", content, place)
            yield events.Event.FromString(content[place + 12 : place + 12 + size])
            place += 16 + size
