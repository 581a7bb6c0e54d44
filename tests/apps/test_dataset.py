"""Rows from a dataset of the user's own: grain's, or any sequence; the same rows however the run is cut up."""

import json
import shutil

import numpy as np
import pytest

from jaxshard.apps.config.config import DataConfig
from jaxshard.apps.data import data
from jaxshard.apps.data.batches import batches_of, heldout_batches
from jaxshard.cli import main

SMALL = ["--model.layers", "1", "--model.width", "16", "--model.heads", "2", "--model.hidden", "32"]
SMALL += ["--train.rows", "8", "--model.sequence-length", "16", "--train.steps", "4", "--optimizer.warmup-steps", "1"]
SMALL += ["--train.log-every", "1", "--train.eval-every", "2", "--train.log-to"]
SOURCE = """
import numpy as np

ROWS = np.random.default_rng(0).integers(0, 256, (60, 17))

class Source:
    def __len__(self):
        return len(ROWS)
    def __getitem__(self, i):
        return ROWS[i]

def plain():
    return list(ROWS)

def others():
    return ROWS[:5].astype(np.uint16)

def grains():
    import grain
    return grain.MapDataset.source(Source()).seed(3).shuffle()

def endless():
    return grains().repeat()
"""


@pytest.fixture
def source(tmp_path):
    (tmp_path / "my data.py").write_text(SOURCE)
    return str(tmp_path / "my data.py")


def read(path, heldout_path=None, length=16, **options):
    typed = [path, heldout_path]
    return data.read(DataConfig(path=path, heldout_path=heldout_path, **options), length, 256, typed)


def rows_of(source):
    names = {}
    exec(SOURCE, names)
    return names["ROWS"]


def test_batches_are_consecutive_elements_and_the_last_part_is_held_out(source):
    text, rows = read(f"{source}:plain"), rows_of(source)
    batches = batches_of(text, 8, 16, seed=1)
    np.testing.assert_array_equal(batches(2)["tokens"], rows[16:24])
    np.testing.assert_array_equal(batches(2, 3, 5)["tokens"], rows[19:21])
    np.testing.assert_array_equal(batches(6)["tokens"], rows[[48, 49, 50, 51, 52, 53, 0, 1]])  # of 54
    np.testing.assert_array_equal(text.heldout, rows[54:])
    assert batches(0)["tokens"].dtype == np.int32
    assert len(read(f"{source}:plain", heldout_bytes=20).heldout) == 2


def test_grains_own_order_is_taken(source):
    grain = pytest.importorskip("grain")
    dataset = grain.MapDataset.source(list(rows_of(source))).seed(3).shuffle()
    text = read(f"{source}:grains")
    np.testing.assert_array_equal(batches_of(text, 8, 16, 0)(1)["tokens"], np.stack([dataset[i] for i in range(8, 16)]))
    with pytest.raises(ValueError, match=r"never ends: leave out repeat\(\)"):
        read(f"{source}:endless")
    endless = read(f"{source}:endless", f"{source}:others")
    assert batches_of(endless, 8, 16, 0)(10**6)["tokens"].shape == (8, 17)


@pytest.mark.parametrize(("rows", "first", "last"), [(4, 0, None), (4, 1, 3), (8, 0, None), (6, 0, 6)])
def test_each_heldout_target_counts_once_and_no_row_runs_into_the_next(source, rows, first, last):
    held = read(f"{source}:plain").heldout
    found, total = [], 0
    for batch, weight in heldout_batches(held, rows, 16, first, last):
        assert batch["tokens"].shape == (len(range(rows)[first:last]), 17)
        found += batch["tokens"][batch["weights"].all(1)].tolist()
        total += weight
        if (first, last) == (0, None):
            assert weight == batch["weights"].sum()
    expected = [held[i].tolist() for i in range(len(held)) if first <= i % rows < (rows if last is None else last)]
    assert found == expected
    assert total == held[:, 1:].size == read(f"{source}:plain").num_targets


def losses(run):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert not any("bits_per_byte" in record for record in records)
    return [record.get("loss", record.get("heldout_loss")) for record in records]


@pytest.mark.parametrize("name", ["plain", "grains"])
def test_a_run_is_resumed_bit_for_bit_and_is_the_same_on_other_devices(source, tmp_path, capfd, name):
    if name == "grains":
        pytest.importorskip("grain")
    options = [*SMALL, "--data", f"{source}:{name}", "--train.save-every", "2"]
    assert main(["train", *options, "--out", str(tmp_path / "whole")]) == 0
    assert "54 rows of tokens to train on, 6 held out" in capfd.readouterr().out
    assert main(["train", *options, "--out", str(tmp_path / "parts")]) == 0
    shutil.rmtree(tmp_path / "parts" / "model" / "4")
    assert main(["train", "--resume", "--out", str(tmp_path / "parts"), "--data", f"{source}:{name}"]) == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    other = ["--sharding.devices", "4", "--sharding.strategy", "zero3"]
    assert main(["train", *options, *other, "--out", str(tmp_path / "other")]) == 0
    assert losses(tmp_path / "other") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    assert main(["eval", str(tmp_path / "parts"), "--data", f"{source}:others"]) == 0
    assert "on 85 tokens" in capfd.readouterr().out


RANDOM = "class A(list):\n def __getitem__(self, i): return np.random.randint(0, 9, 17)\n"
WRONG = {
    "def f(): return 3": "returned a int: it must return rows of tokens, as a grain.MapDataset",
    "def f(): return (x for x in [])": "returned a generator: it must return",
    "def f(): return []": "has no elements",
    "def f(): return [np.zeros(17, int)]": "has 1 elements, too few to hold out a fraction of 0.1",
    "def f(): return [np.zeros(16, int)] * 20": "element 0 is int64 of shape (16,), and a row of tokens is a 1-D array",
    "def f(): return [np.zeros((2, 17), int)] * 20": "element 0 is int64 of shape (2, 17), and a row",
    "def f(): return [np.zeros(17)] * 20": "element 0 is float64 of shape (17,), and a row",
    "def f(): return [{'tokens': np.zeros(17, int)}] * 20": "element 0 is dict, and a row",
    "def f(): return [[[1] * 17, [2] * 9]] * 20": "element 0 is list of shape (2,), and a row",
    "def f(): return [[-1] * 17] * 20": "element 0 has the token -1",
    "def f(): return [[256] * 17] * 20": "model.vocabulary = 256: set it to 257 or more",
    "def f(): 1 / 0": "x.py:2: ZeroDivisionError: division by zero",
    "def f(x): return []": "f must take no arguments",
    "f = 3": "f is not a function, but of type int",
    "def g(): return []": "x.py has no f",
    "import nowhere_at_all": "No module named 'nowhere_at_all'",
    f"{RANDOM}def f(): return A([0] * 20)": "element 0 differs when it is read again",
}


@pytest.mark.parametrize("code", WRONG)
def test_what_cannot_be_is_told_before_anything_is_done(code, tmp_path, capsys):
    (tmp_path / "x.py").write_text(f"import numpy as np\n{code}\n")
    path = f"{tmp_path / 'x.py'}:f"
    assert main(["train", *SMALL, "--data", path, "--out", str(tmp_path / "run")]) == 2
    printed = capsys.readouterr()
    assert WRONG[code] in printed.err
    assert (printed.out, (tmp_path / "run").exists()) == ("", False)


def test_functions_that_are_not_there_are_told(tmp_path, source):
    for path, message in {
        "nowhere.py:f": "the file 'nowhere.py' does not exist",
        "nowhere:f": "no module 'nowhere' in this folder",
    }.items():
        with pytest.raises(ValueError, match=message):
            read(path)
    (tmp_path / "val.txt").write_text("text")
    with pytest.raises(ValueError, match=r"data.heldout_path = .*val.txt: data.path is a function"):
        read(f"{source}:plain", str(tmp_path / "val.txt"))


def test_an_element_that_fails_later_is_told_and_the_last_save_kept(tmp_path, capsys):
    code = "import numpy as np\nclass A(list):\n def __getitem__(self, i): return np.zeros(9 if i == 22 else 17, int)\n"
    (tmp_path / "x.py").write_text(code + "def f(): return A([0] * 60)\n")
    options = [*SMALL, "--train.save-every", "1", "--data", f"{tmp_path / 'x.py'}:f"]
    assert main(["train", *options, "--out", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert "element 22 is int64 of shape (9,), and a row of tokens" in error
    assert "the last save is step " in error
