"""Text in, batches out: pure functions of seed and step."""

import os
import sys
import sysconfig

import numpy as np
import pytest

from jaxshard.apps.data import data, text_files
from jaxshard.apps.data.batches import TrainingBatches, heldout_batches

TEXT = np.arange(1000, dtype=np.uint16).astype(np.uint8)


def batches(text=TEXT, rows=4, length=16, seed=0):
    return TrainingBatches(text, rows, length, seed)


def test_built_in_text_is_english_of_known_size():
    text = text_files.read_text(None)
    assert 400_000 < len(text) < 600_000
    assert b"the" in text.tobytes()
    assert 2.2 < data.zlib_bits_per_byte(text) < 2.4


def test_the_standard_library_is_code_of_known_size():
    text = text_files.read_text("stdlib")
    assert 7_000_000 < len(text) < 10_000_000
    assert b"def dataclass(" in text.tobytes()
    assert 1.9 < data.zlib_bits_per_byte(text) < 2.1


def test_the_standard_library_is_the_modules_that_every_distribution_has():
    root = sysconfig.get_path("stdlib")
    paths = [path.relative_to(root) for path in text_files.readable("--data", "stdlib")]
    assert {"ast.py", "json/decoder.py", "asyncio/tasks.py"} < {path.as_posix() for path in paths}
    assert {path.parts[0].removesuffix(".py") for path in paths} <= sys.stdlib_module_names
    folders = {folder for path in paths for folder in path.parts}
    assert not {"site-packages", "test", "tests", "idlelib", "encodings", "__pycache__"} & folders
    assert len(paths) == len(set(paths)) > 300


def test_the_end_of_the_standard_library_is_of_many_modules():
    """In alphabetical order it is XML alone."""
    paths = text_files.readable("--data", "stdlib")
    assert len({path.name[0] for path in paths[-len(paths) // 10 :]}) > 8


def test_a_module_has_the_same_place_whatever_others_there_are(tmp_path, monkeypatch):
    (tmp_path / "json").mkdir()
    for name in ("ast", "json/decoder", "abc", "typing", "site-packages"):
        (tmp_path / f"{name}.py").touch()
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    every = [path.name for path in text_files.stdlib_files("--data")]
    assert sorted(every) == ["abc.py", "ast.py", "decoder.py", "typing.py"] != every
    (tmp_path / "ast.py").unlink()
    every.remove("ast.py")
    assert [path.name for path in text_files.stdlib_files("--data")] == every


def test_a_python_without_source_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "python311.zip"))
    with pytest.raises(
        ValueError, match=r"data.path: 'stdlib': this Python does not include the source .*python311\.zip': give a file"
    ):
        text_files.read_text("stdlib")


def test_a_file_of_the_name_of_the_standard_library_is_not_passed_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stdlib").write_text("mine")
    with pytest.raises(
        ValueError, match=r"--data: 'stdlib' is the source of .* has the same name: write ./stdlib for it"
    ):
        text_files.readable("--data", "stdlib")
    assert text_files.read_text("./stdlib").tobytes() == b"mine"


def test_folder_is_read_in_the_order_of_relative_paths(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_bytes(b"second \xff")
    (tmp_path / "a.txt").write_bytes(b"first")
    (tmp_path / "c.txt").write_bytes(b"third")
    assert text_files.read_text(str(tmp_path)).tobytes() == b"first\nsecond \xff\nthird"
    assert text_files.read_text(str(tmp_path / "a.txt")).tobytes() == b"first"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), r"is empty \(0 files\)"),
        (lambda path: path.write_bytes(b" \n"), r"is empty \(1 files\)"),
        (lambda path: os.mkfifo(path), "is neither a file nor a folder: put the text into a file"),
        (lambda path: path.symlink_to("/dev/zero"), "is neither a file nor a folder"),
        (lambda path: path.symlink_to("nowhere"), r"is a broken link \(No such file"),
        (lambda path: path.symlink_to(path), r"is a broken link \(Too many levels"),
        (lambda path: (path.mkdir(), os.mkfifo(path / "b")), r"text/b' is neither a file nor a folder"),
        (lambda path: (path.mkdir(), (path / "b").symlink_to("gone")), r"text/b' is a broken link"),
        (lambda path: (path.mkdir(), (path / "b").symlink_to(path)), r"text/b' is a link to a folder that contains it"),
        (lambda path: (path.touch(), os.truncate(path, 2**42)), "would take 8,796 GB, and only"),
    ],
)
def test_bad_path_is_named(tmp_path, make, message):
    path = tmp_path / "text"
    make(path)
    with pytest.raises(ValueError, match=message) as raised:
        text_files.read_text(str(path))
    assert str(path) in str(raised.value)


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    """It was left out in silence."""
    (tmp_path / "a").mkdir()
    (tmp_path / "text").write_text("a text")
    listed = os.listdir

    def refuse(path):
        if path == tmp_path / "a":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr("os.listdir", refuse)
    with pytest.raises(ValueError, match=f"data.path: '{tmp_path}' cannot be read: .*Permission denied: .*/a'"):
        text_files.read_text(str(tmp_path))


def test_links_to_files_and_folders_are_followed(tmp_path):
    """Python leaves linked folders out, or not, from version to version."""
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "far" / "deep" / "x").write_text("far")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "b").symlink_to(tmp_path / "far")
    (tmp_path / "text" / "c").symlink_to(tmp_path / "far" / "deep" / "x")
    (tmp_path / "text" / "a").write_text("near")
    assert text_files.read_text(str(tmp_path / "text")).tobytes() == b"near\nfar\nfar"


def test_deep_folders_are_read(tmp_path):
    deep = tmp_path
    for _ in range(1500):
        deep /= "d"
        deep.mkdir()
    (deep / "x").write_text("deep")
    assert text_files.read_text(str(tmp_path)).tobytes() == b"deep"
    while deep != tmp_path:  # shutil.rmtree would go too deep
        for file in deep.iterdir():
            file.unlink() if file.is_file() else file.rmdir()
        deep = deep.parent


def test_unreadable_file_is_named(tmp_path, monkeypatch):
    def refuse(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "text").write_text("secret")
    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(ValueError, match=f"{tmp_path}.* cannot be read.*Permission denied"):
        text_files.read_text(str(tmp_path))


def test_split_holds_out_the_end():
    train, heldout = data.split(TEXT, 0.1, 16)
    np.testing.assert_array_equal(np.concatenate([train, heldout]), TEXT)
    assert len(heldout) == 100


def test_split_of_next_to_nothing_is_refused():
    with pytest.raises(ValueError, match="give a text of an impossible number of bytes"):
        data.split(TEXT, 5e-324, 128)


@pytest.mark.parametrize("heldout", [0.1, 0.9])
def test_split_says_how_much_text_is_needed(heldout):
    with pytest.raises(ValueError, match="give a text of 1291 bytes or more"):
        data.split(TEXT, heldout, 128)
    data.split(np.zeros(1291, np.uint8), heldout, 128)


def test_batch_is_a_function_of_seed_and_step():
    tokens = batches()(7)["tokens"]
    assert tokens.shape == (4, 17)
    assert tokens.dtype == np.int32
    np.testing.assert_array_equal(tokens, batches()(7)["tokens"])
    assert not np.array_equal(tokens, batches()(8)["tokens"])
    assert not np.array_equal(tokens, batches(seed=1)(7)["tokens"])


def test_rows_are_consecutive_text():
    text = np.random.default_rng(0).integers(256, size=1000).astype(np.uint8)
    for row in batches(text)(3)["tokens"]:
        assert row.astype(np.uint8).tobytes() in text.tobytes()


def test_epoch_visits_every_window_once_and_the_next_one_in_another_order():
    text = np.arange(50 * 16 + 1, dtype=np.uint16)  # every position has a value of its own
    made = batches(text, rows=7)
    firsts = np.concatenate([made(step)["tokens"][:, 0] for step in range(14)])  # 98 rows: two epochs of 49 windows
    assert len(set(firsts[:49])) == len(set(firsts[49:])) == 49
    assert len(set(firsts[:49] % 16)) == 1  # one offset for the whole epoch
    assert list(firsts[:49]) != list(firsts[49:])


def test_last_byte_is_reached():
    text = np.arange(34, dtype=np.uint16)
    seen = {int(batches(text, rows=1)(step)["tokens"][0, -1]) for step in range(300)}
    assert max(seen) == 33


def test_text_of_one_window_works():
    assert batches(TEXT[:17], rows=3)(5)["tokens"].shape == (3, 17)


def test_processes_take_disjoint_parts_of_the_same_batch():
    whole = batches()(2)["tokens"]
    parts = [batches()(2, first, first + 2)["tokens"] for first in (0, 2)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("num_bytes", [2, 17, 64, 65, 66, 1000])
def test_each_heldout_byte_but_the_first_is_predicted_once(num_bytes):
    text = np.arange(num_bytes, dtype=np.uint16)
    targets, total = [], 0
    for batch, weight in heldout_batches(text, rows=4, length=16):
        assert batch["tokens"].shape == (4, 17)
        assert weight == batch["weights"].sum() > 0
        targets += batch["tokens"][:, 1:][batch["weights"] == 1].tolist()
        total += weight
    assert targets == list(range(1, num_bytes))
    assert total == num_bytes - 1


def test_heldout_rows_of_a_process():
    text = np.arange(100, dtype=np.uint8)
    for (whole, weight), (mine, same) in zip(
        heldout_batches(text, 4, 16), heldout_batches(text, 4, 16, 2, 4), strict=True
    ):
        np.testing.assert_array_equal(whole["tokens"][2:], mine["tokens"])
        np.testing.assert_array_equal(whole["weights"][2:], mine["weights"])
        assert weight == same
