"""`jaxshard ckpt`, in this process: what it shows, what it finds, what it refuses, and what it leaves behind."""

import errno
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import SafetensorError, flax, safe_open
from safetensors import numpy as safetensors_numpy

from jaxshard.checkpoint import Checkpointer
from jaxshard.cli import main
from jaxshard.cli.ckpt import export as ckpt_export
from jaxshard.cli.ckpt import tables as ckpt_tables
from jaxshard.system import files


def tree(scale=1.0):
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(scale * rng.normal(size=(64, 48)), jnp.bfloat16), "[red]b": jnp.arange(48.0)}
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    moment = jax.device_put(rng.normal(size=(64, 48)).astype("f"), sharding)
    return {"params": params, "mu": moment, "key": jax.random.key(7), "empty": jnp.zeros((0, 3)), "step": 3}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder: two checkpoints of one tree, whose `w` differs, and one of a third."""
    folder = tmp_path_factory.mktemp("run")
    with Checkpointer(folder / "model") as checkpoints:
        checkpoints.save(10, tree(), metrics={"loss": 2.5, "accuracy": 0.25})
        checkpoints.save(20, tree(2.0))
        checkpoints.save(30, tree(2.0) | {"mu": jnp.zeros(7), "nu": jnp.zeros((2, 2), jnp.int8)})
    return folder


@pytest.fixture
def copy(run, tmp_path):
    shutil.copytree(run, tmp_path / "copy")
    return tmp_path / "copy"


def flip_largest(step_folder):
    """A bit in the middle of the largest array's bytes."""
    found = [path for path in step_folder.rglob("*") if path.is_file() and path.parent.name == "d"]
    path = max(found, key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def parsed(file):
    """(header, arrays' bytes); the library writes the notes in the header in any order."""
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def run_ckpt(capsys, *arguments):
    """(exit status, standard output's lines, standard error)"""
    status = main(["ckpt", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, [line.rstrip() for line in out.splitlines()], err


def everything(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


# ls and info


@pytest.mark.parametrize("where", [".", "model"])
def test_ls(run, capsys, where):
    status, lines, _ = run_ckpt(capsys, "ls", run / where)
    assert status == 0
    assert " ".join(lines[0].split()) == "step saved on disk leaves elements in arrays index numbers metrics"
    elements, size = 64 * 48 * 2 + 48 + 2 + 1, 2 * 64 * 48 + 4 * 48 + 4 * 64 * 48 + 8 + 4
    assert lines[1].endswith(f"6     {elements:,}    {size / 1000:.1f} kB  ok     finite   loss 2.5, accuracy 0.25")
    assert [line.split()[0] for line in lines[1:]] == ["10", "20", "30"]


def test_ls_of_one_step(run, capsys):
    _, lines, _ = run_ckpt(capsys, "ls", run / "model" / "20")
    assert [line.split()[0] for line in lines] == ["step", "20"]


def test_ls_lists_what_is_no_checkpoint_beneath(copy, capsys):
    for name in ("40", "5.uncommitted.0a1b2c3d", "6.corrupt.0a1b2c3d", "50.orbax-checkpoint-tmp", "notes"):
        (copy / "model" / name).mkdir()
    (copy / "model" / "20" / "_CHECKPOINT_METADATA").write_text("{}")
    status, lines, _ = run_ckpt(capsys, "ls", copy)
    assert status == 0
    assert [line.split()[-1] for line in lines[2:3]] == ["unreadable"]
    assert lines[4:] == [
        "40: not a checkpoint: uncommitted: it was not written completely",
        "5.uncommitted.0a1b2c3d: not a checkpoint: moved aside, uncommitted",
        "50.orbax-checkpoint-tmp: not a checkpoint: temporary: it is being written, or writing it was interrupted",
        "6.corrupt.0a1b2c3d: not a checkpoint: moved aside, corrupt",
    ]


def test_info_reads_the_index_alone(copy, capsys):
    saved = Checkpointer(copy / "model").info(10)
    for path in (copy / "model" / "10" / "state").rglob("*"):
        if path.is_file():
            path.unlink()
    status, lines, _ = run_ckpt(capsys, "info", copy, "--step", 10)
    assert status == 0
    assert lines[0].startswith(f"step 10 in {copy / 'model'}, saved 2")
    assert lines[1:4] == [f"run: {saved['run']}", "metrics: loss 2.5, accuracy 0.25", "numbers: finite"]
    rows = {line.split("  ")[0].strip(): line for line in lines[5:-1]}
    assert set(rows) == {"params/w", "params/[red]b", "mu", "key", "empty", "step"}
    digest = saved["leaves"]["params/w"]["digest"]
    assert rows["params/w"].split() == ["params/w", "(64,", "48)", "bfloat16", "6,144", f"{digest:08x}"]
    assert lines[-1] == "leaves: 6, elements: 6,195, bytes: 18,640"


def test_info_shows_the_newest(run, capsys):
    assert run_ckpt(capsys, "info", run)[1][0].startswith("step 30 in ")
    assert run_ckpt(capsys, "info", run / "model" / "20")[1][0].startswith("step 20 in ")


def test_names_of_leaves_cannot_move_the_cursor(tmp_path, capsys):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"a\x1b[2Jb\n": jnp.ones(2)})
    for command in (["info"], ["diff", str(tmp_path)]):
        main(["ckpt", *command, str(tmp_path)])
        assert "\x1b" not in capsys.readouterr().out
    assert "a\\x1b[2Jb\\n  (2,)" in "\n".join(run_ckpt(capsys, "info", tmp_path)[1])


def test_in_a_narrow_terminal_nothing_is_cut_off(run, capsys, monkeypatch):
    """Cells take several lines; each figure has its own place on one."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    monkeypatch.setenv("COLUMNS", "80")
    for command in (["ls", run], ["info", run, "--step", 10]):
        _, lines, _ = run_ckpt(capsys, *command)
        table = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines if str(run) not in line]
        assert max(map(len, table)) <= 80
        assert "…" not in "".join(table)
        text = "\n".join(table)
        for figure in ("6,195", "18.6 kB", "10") if command[0] == "ls" else ("6,144", "12,288", "(64, 48)"):
            assert figure in text


# verify


def test_verify_names_the_leaf_that_has_a_flipped_bit(copy, capsys):
    assert run_ckpt(capsys, "verify", copy)[:2] == (0, ["step 10: intact", "step 20: intact", "step 30: intact"])
    flip_largest(copy / "model" / "20")
    before = everything(copy)
    status, lines, _ = run_ckpt(capsys, "verify", copy)
    assert (status, lines[::2]) == (1, ["step 10: intact", "step 30: intact"])
    assert lines[1] == "step 20: corrupt: mu: its bits differ from those saved"
    assert run_ckpt(capsys, "verify", copy, "--step", 20)[:2] == (1, lines[1:2])
    assert run_ckpt(capsys, "verify", copy / "model" / "20")[:2] == (1, lines[1:2])
    assert run_ckpt(capsys, "verify", copy, "--step", 10)[:2] == (0, lines[:1])
    assert everything(copy) == before


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b'"bfloat16"', b'"bfmoat16"', "its index cannot be read"),
        (b'"digest"', b'"dig%st"', "its index cannot be read"),
        (b'"mu"', b'"mt"', "its index cannot be read"),
        (b'"leaves"', b'"neaves"', "its index cannot be read"),
    ],
)
def test_verify_finds_flipped_bits_in_the_index(copy, capsys, old, new, reason):
    index = copy / "model" / "10" / "_CHECKPOINT_METADATA"
    content = index.read_bytes()
    assert old in content
    index.write_bytes(content.replace(old, new, 1))
    status, lines, _ = run_ckpt(capsys, "verify", copy)
    assert (status, lines[1:]) == (1, ["step 20: intact", "step 30: intact"])
    assert reason in lines[0]


def test_verify_takes_what_a_run_deletes_meanwhile_for_no_harm(copy, capsys, monkeypatch):
    verify = Checkpointer.verify

    def deleted(self, step):
        if step == 10:
            shutil.rmtree(self.path / "10")
        verify(self, step)

    monkeypatch.setattr(Checkpointer, "verify", deleted)
    status, lines, _ = run_ckpt(capsys, "verify", copy)
    assert (status, lines) == (0, ["step 10: deleted by its run", "step 20: intact", "step 30: intact"])


def test_checkpoints_of_64_bits_are_whole(tmp_path, capsys):
    with jax.enable_x64(True), Checkpointer(tmp_path / "saved") as checkpoints:
        saved = {"x": jnp.arange(5.0) / 3, "n": jnp.arange(3) + 2**40}
        assert saved["x"].dtype == jnp.float64
        checkpoints.save(1, saved)
    assert run_ckpt(capsys, "verify", tmp_path / "saved")[:2] == (0, ["step 1: intact"])
    assert run_ckpt(capsys, "export", tmp_path / "saved", "--safetensors", tmp_path / "x.safetensors")[0] == 0
    assert jnp.ones(1, float).dtype == jnp.float32
    with safe_open(tmp_path / "x.safetensors", framework="numpy") as file:
        np.testing.assert_array_equal(file.get_tensor("x"), saved["x"])
        np.testing.assert_array_equal(file.get_tensor("n"), saved["n"])


# diff


def test_diff(run, capsys):
    model = run / "model"
    status, lines, _ = run_ckpt(capsys, "diff", model / "20", run)
    assert status == 1
    assert lines == [
        f"- step 20 in {model}",
        f"+ step 30 in {model}",
        "+ nu: only here: int8[2, 2]",
        "! mu: float32[64, 48], float32[7]",
        "leaves that differ: 2",
    ]
    assert "- nu: only here: int8[2, 2]" in run_ckpt(capsys, "diff", run, model / "20")[1]
    status, lines, _ = run_ckpt(capsys, "diff", model / "10", model / "20")
    assert (status, lines[2:]) == (1, ["! params/w: different values", "leaves that differ: 1"])


def test_diff_with_values(run, capsys):
    one, two = (np.asarray(tree(scale)["params"]["w"], np.float64) for scale in (1, 2))
    status, lines, _ = run_ckpt(capsys, "diff", run / "model" / "10", run / "model" / "20", "--values")
    assert (status, lines[2]) == (1, f"! params/w: different values, largest difference {np.abs(one - two).max():.6g}")


def test_diff_of_the_same(run, copy, capsys):
    status, lines, _ = run_ckpt(capsys, "diff", run, copy, "--values")
    assert (status, lines[2:]) == (0, ["leaves that differ: 0"])


def test_diff_of_what_is_corrupt_is_no_difference(run, copy, capsys):
    flip_largest(copy / "model" / "20")
    with Checkpointer(copy / "other") as checkpoints:
        checkpoints.save(1, tree(3.0) | {"mu": jnp.ones((64, 48))})
    status, _, err = run_ckpt(capsys, "diff", copy / "model" / "20", copy / "other", "--values")
    assert (status, err) == (2, "jaxshard ckpt: checkpoint 20 is corrupt: mu: its bits differ from those saved\n")


@pytest.mark.parametrize(
    ("a", "b", "largest"),
    [
        (np.array([1, 2], ml_dtypes.bfloat16), np.array([1, 2.5], ml_dtypes.bfloat16), 0.5),
        (np.array([0, 255], np.uint8), np.array([255, 255], np.uint8), 255),
        (np.array([True, False]), np.array([True, True]), 1),
        (np.array([-7], ml_dtypes.int4), np.array([7], ml_dtypes.int4), 14),
        (np.array([3 + 4j], np.complex64), np.array([0j], np.complex64), 5),
        (np.array([np.inf, 1.0]), np.array([-np.inf, 1.0]), np.inf),
        (np.array([0.0, np.nan]), np.array([-0.0, np.nan]), 0),
        (np.array([5.0, np.nan]), np.array([1.0, 1.0]), np.nan),
        (np.float32(3), np.float32(1), 2),
    ],
)
def test_largest_difference(monkeypatch, a, b, largest):
    monkeypatch.setattr(ckpt_tables, "_COMPARED", 1)
    np.testing.assert_equal(ckpt_tables.largest_difference(a, b), largest)


# export


def test_export_is_the_same_bit_for_bit(run, tmp_path, capsys):
    file = tmp_path / "all.safetensors"
    status, lines, _ = run_ckpt(capsys, "export", run, "--safetensors", file, "--step", 20)
    assert (status, lines) == (0, [f"wrote {file}: step 20, leaves: 6, 18.6 kB; all digests match"])
    saved = tree(2.0)
    wanted = {
        "params/w": saved["params"]["w"],
        "params/[red]b": saved["params"]["[red]b"],
        "mu": saved["mu"],
        "key": jax.random.key_data(saved["key"]),
        "empty": saved["empty"],
        "step": np.int64(3),
    }
    with safe_open(file, framework="numpy") as opened:
        assert set(opened.keys()) == set(wanted)
        assert opened.metadata()["step"] == "20"
        for path, x in wanted.items():
            found = opened.get_tensor(path)
            assert (found.dtype, found.shape) == (x.dtype, x.shape)
            assert found.tobytes() == np.asarray(x).tobytes()
    assert os.listdir(tmp_path) == ["all.safetensors"]


def test_every_array_of_an_export_is_aligned(tmp_path, capsys):
    """Readers map the file."""
    with Checkpointer(tmp_path / "saved") as checkpoints:
        checkpoints.save(1, {"a": jnp.ones(3, jnp.int8), "b": jnp.arange(9.0), "c": jnp.ones(5, jnp.bfloat16)})
    file = tmp_path / "x.safetensors"
    assert run_ckpt(capsys, "export", tmp_path / "saved", "--safetensors", file)[0] == 0
    starts = {path: leaf["data_offsets"][0] for path, leaf in parsed(file)[0].items() if path in "abc"}
    assert starts == {"b": 0, "c": 36, "a": 46}
    assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0


def test_export_of_some(run, tmp_path, capsys):
    file = tmp_path / "params.safetensors"
    assert run_ckpt(capsys, "export", run, "--safetensors", file, "--only", "^params/")[0] == 0
    with safe_open(file, framework="numpy") as opened:
        assert set(opened.keys()) == {"params/w", "params/[red]b"}
    assert run_ckpt(capsys, "export", run, "--safetensors", tmp_path / "e.safetensors", "--only", "empty")[0] == 0


@pytest.mark.parametrize("part", [1, 2**28])
def test_export_in_parts_of_any_size(run, tmp_path, capsys, monkeypatch, part):
    monkeypatch.setattr("jaxshard.checkpoint.reading._BYTES_AT_ONCE", part)
    files = [tmp_path / f"{i}.safetensors" for i in range(2)]
    assert run_ckpt(capsys, "export", run, "--safetensors", files[0])[0] == 0
    monkeypatch.undo()
    assert run_ckpt(capsys, "export", run, "--safetensors", files[1])[0] == 0
    assert parsed(files[0]) == parsed(files[1])


def test_export_of_what_is_corrupt_leaves_nothing(copy, tmp_path, capsys):
    flip_largest(copy / "model" / "20")
    file = tmp_path / "out" / "x.safetensors"
    file.parent.mkdir()
    status, _, err = run_ckpt(capsys, "export", copy, "--safetensors", file, "--step", 20)
    assert (status, err) == (1, "jaxshard ckpt: checkpoint 20 is corrupt: mu: its bits differ from those saved\n")
    assert os.listdir(file.parent) == []
    assert run_ckpt(capsys, "export", copy, "--safetensors", file, "--step", 20, "--only", "w$")[0] == 0


def test_export_that_is_interrupted_leaves_nothing(run, tmp_path, capsys, monkeypatch):
    def read(self, step, paths):
        yield paths[0], np.zeros(2)
        raise KeyboardInterrupt

    monkeypatch.setattr(Checkpointer, "read", read)
    status, _, err = run_ckpt(capsys, "export", run, "--safetensors", tmp_path / "x.safetensors")
    assert (status, err) == (130, "jaxshard ckpt: interrupted; nothing was written\n")
    assert os.listdir(tmp_path) == []


def test_export_does_not_overwrite_what_came_meanwhile(run, tmp_path, capsys, monkeypatch):
    file, write = tmp_path / "x.safetensors", ckpt_export._write_shard

    def come(*arguments):
        write(*arguments)
        file.write_text("mine")

    monkeypatch.setattr(ckpt_export, "_write_shard", come)
    assert run_ckpt(capsys, "export", run, "--safetensors", file)[0] == 2
    assert os.listdir(tmp_path) == ["x.safetensors"]
    assert file.read_text() == "mine"


def test_export_names_all_leaves_that_the_format_cannot_hold(tmp_path, capsys):
    with Checkpointer(tmp_path / "saved") as checkpoints:
        checkpoints.save(1, {"a": jnp.ones(4, jnp.int4), "z": jnp.ones(2, jnp.complex64), "__metadata__": jnp.ones(2)})
    before = everything(tmp_path)
    file = tmp_path / "x.safetensors"
    status, _, err = run_ckpt(capsys, "export", tmp_path / "saved", "--safetensors", file)
    assert (status, err.splitlines()) == (
        2,
        ["jaxshard ckpt: a .safetensors file cannot hold a (int4): choose different leaves with --only REGEX"],
    )
    status, _, err = run_ckpt(capsys, "export", tmp_path / "saved", "--safetensors", file, "--only", "_")
    assert status == 2
    assert "a leaf called __metadata__" in err
    assert everything(tmp_path) == before
    assert run_ckpt(capsys, "export", tmp_path / "saved", "--safetensors", file, "--only", "z")[0] == 0


def test_export_without_space(run, tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=7)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    status, _, err = run_ckpt(capsys, "export", run, "--safetensors", tmp_path / "x.safetensors")
    assert status == 2
    assert "no space: the arrays take 6.38 kB and 7 B are free" in err
    assert os.listdir(tmp_path) == []


# export in shards


def exported(folder, index):
    """Path -> array, as a loader of Hugging Face finds them: by the index."""
    places = json.loads((folder / index).read_text())["weight_map"]
    arrays = {name: safetensors_numpy.load_file(folder / name) for name in set(places.values())}
    assert {path for held in arrays.values() for path in held} == set(places)
    return {path: arrays[name][path] for path, name in places.items()}


@pytest.mark.parametrize(("size", "count"), [("13kB", 2), ("12288B", 3), ("12287B", 2), ("6.2 kB", 3), ("1B", 6)])
def test_export_in_shards_is_the_same_bit_for_bit(run, tmp_path, capsys, size, count):
    """The leaves, in bytes: empty 0, key 8, mu 12288, [red]b 192, w 6144, step 8."""
    whole = tmp_path / "whole.safetensors"
    assert run_ckpt(capsys, "export", run, "--safetensors", whole, "--step", 20)[0] == 0
    file, folder = tmp_path / "out" / "model.safetensors", tmp_path / "out"
    folder.mkdir()
    status, lines, _ = run_ckpt(capsys, "export", run, "--safetensors", file, "--step", 20, "--shard-size", size)
    shown = f"wrote {file}.index.json and {count} shards: step 20, leaves: 6, 18.6 kB; all digests match"
    assert (status, lines) == (0, [shown])
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    assert sorted(os.listdir(folder)) == sorted([*names, "model.safetensors.index.json"])
    found, wanted = exported(folder, "model.safetensors.index.json"), safetensors_numpy.load_file(whole)
    assert set(found) == set(wanted)
    for path, x in wanted.items():
        assert (found[path].dtype, found[path].shape, found[path].tobytes()) == (x.dtype, x.shape, x.tobytes())


def test_the_index_is_as_hugging_face_writes_it(run, tmp_path, capsys):
    """The keys, the sum of the arrays' bytes, two spaces, sorted, a newline at the end; "pt" opens every loader."""
    file = tmp_path / "model.safetensors"
    assert run_ckpt(capsys, "export", run, "--safetensors", file, "--step", 20, "--shard-size", "13kB")[0] == 0
    text = (tmp_path / "model.safetensors.index.json").read_text()
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    places = dict.fromkeys(("empty", "key", "mu", "params/[red]b"), first) | {"params/w": second, "step": second}
    assert json.loads(text) == {"metadata": {"total_size": 18_640}, "weight_map": places}
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"
    for name in (first, second):
        with safe_open(tmp_path / name, framework="numpy") as opened:
            assert opened.metadata()["format"] == "pt"
            assert opened.metadata()["step"] == "20"
            assert set(opened.keys()) == {path for path, place in places.items() if place == name}


def test_shards_are_dealt_out_in_the_leaves_order():
    """As huggingface_hub's `split_torch_state_dict_into_shards` does: what is too large alone, at once."""
    leaves = {
        name: {"shape": [size], "dtype": "int8"} for name, size in zip("abcdefg", (3, 4, 9, 3, 8, 1, 0), strict=True)
    }
    dealt = ckpt_export.shards_of(pathlib.Path("x/m.safetensors"), leaves, 8)
    assert list(dealt.values()) == [["c"], ["a", "b"], ["d"], ["e"], ["f", "g"]]
    assert [str(path) for path in dealt][::4] == ["x/m-00001-of-00005.safetensors", "x/m-00005-of-00005.safetensors"]
    assert ckpt_export.shards_of(pathlib.Path("x/m.safetensors"), leaves, 28) == {
        pathlib.Path("x/m.safetensors"): list("abcdefg")
    }


def test_flax_reads_the_shards(run, tmp_path, capsys):
    file = tmp_path / "model.safetensors"
    options = ["--step", 20, "--shard-size", "6kB", "--only", "params"]
    assert run_ckpt(capsys, "export", run, "--safetensors", file, *options)[0] == 0
    read = [flax.load_file(path) for path in sorted(tmp_path.glob("*.safetensors"))]
    assert [set(held) for held in read] == [{"params/w"}, {"params/[red]b"}]
    assert read[0]["params/w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(read[0]["params/w"], tree(2.0)["params"]["w"])


def test_a_file_without_the_suffix_names_shards_that_have_it(run, tmp_path, capsys):
    assert run_ckpt(capsys, "export", run, "--safetensors", tmp_path / "v1.5", "--shard-size", "6kB")[0] == 0
    names = {f"v1.5-0000{number}-of-00002.safetensors" for number in (1, 2)}
    assert set(os.listdir(tmp_path)) == {*names, "v1.5.safetensors.index.json"}


def test_one_shard_is_held_at_a_time(run, tmp_path, capsys, monkeypatch):
    read, held, most = Checkpointer.read, weakref.WeakSet(), []

    def watched(self, step, paths):
        for path, x in read(self, step, paths):
            array = np.array(x).view(Array)
            held.add(array)
            most.append(sum(each.nbytes for each in held))
            yield path, array

    class Array(np.ndarray):
        __hash__ = object.__hash__

        def __eq__(self, other):
            return self is other

    monkeypatch.setattr(Checkpointer, "read", watched)
    file = tmp_path / "model.safetensors"
    assert run_ckpt(capsys, "export", run, "--safetensors", file, "--step", 20, "--shard-size", "13kB")[0] == 0
    assert len(most) == 6
    assert max(most) <= 13_000


@pytest.mark.parametrize("name", ["x.safetensors", "x.safetensors.index.json", "x-00002-of-00002.safetensors"])
def test_shards_do_not_overwrite_anything(run, tmp_path, capsys, name):
    (tmp_path / name).write_text("mine")
    options = ["--step", 20, "--shard-size", "13kB"]
    status, _, err = run_ckpt(capsys, "export", run, "--safetensors", tmp_path / "x.safetensors", *options)
    assert status == 2
    assert f"{name} already exists: give a new file" in err
    assert os.listdir(tmp_path) == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_an_export_whose_last_file_cannot_be_moved_leaves_nothing(run, tmp_path, capsys, monkeypatch):
    link = os.link

    def failing(path, target):
        if path.name.endswith(".json"):
            raise OSError(errno.EIO, "the disk is gone", str(target))
        return link(path, target)

    monkeypatch.setattr(os, "link", failing)
    options = ["--step", 20, "--shard-size", "13kB"]
    status, _, err = run_ckpt(capsys, "export", run, "--safetensors", tmp_path / "x.safetensors", *options)
    assert (status, os.listdir(tmp_path)) == (2, [])
    assert "the disk is gone" in err


def test_an_export_that_cannot_be_written_leaves_nothing(run, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(ckpt_export, "save_file", full)
    status, _, err = run_ckpt(capsys, "export", run, "--safetensors", tmp_path / "x.safetensors")
    assert (status, os.listdir(tmp_path)) == (2, [])
    assert "No space left on device" in err


def test_what_a_killed_export_left_is_deleted_by_the_next_one(run, tmp_path, capsys):
    """Killed while it wrote: its folder with a shard, and the file that its end has unlocked."""
    with files.workplace(tmp_path) as others:
        left = copy_of(others, tmp_path / f".jaxshard-{12 * '0f'}")
        (left / "x-00001-of-00009.safetensors").write_text("")
        assert run_ckpt(capsys, "export", run, "--safetensors", tmp_path / "x.safetensors")[0] == 0
        assert sorted(os.listdir(tmp_path)) == sorted([others.name, others.name.removesuffix(".d"), "x.safetensors"])
    assert os.listdir(tmp_path) == ["x.safetensors"]


def copy_of(place, name):
    """A temporary folder, and the file beside it, under another name."""
    name.write_bytes(place.with_suffix("").read_bytes())
    return shutil.copytree(place, name.with_name(f"{name.name}.d"))


def test_of_two_exports_to_one_file_at_once_one_is_refused(run, tmp_path, capsys, monkeypatch):
    target, save_file = tmp_path / "x.safetensors", ckpt_export.save_file

    def late(*arguments):
        monkeypatch.setattr(ckpt_export, "save_file", save_file)
        assert run_ckpt(capsys, "export", run, "--safetensors", target)[0] == 0
        save_file(*arguments)

    monkeypatch.setattr(ckpt_export, "save_file", late)
    status, _, err = run_ckpt(capsys, "export", run, "--safetensors", target)
    assert (status, "already exists" in err) == (2, True)
    assert os.listdir(tmp_path) == ["x.safetensors"]
    with safe_open(target, "np") as written:
        assert list(written.keys())


def test_an_export_can_be_read_by_whom_the_umask_lets(run, tmp_path, capsys):
    before = os.umask(0o027)
    try:
        assert run_ckpt(capsys, "export", run, "--safetensors", tmp_path / "x.safetensors")[0] == 0
    finally:
        os.umask(before)
    assert (tmp_path / "x.safetensors").stat().st_mode & 0o777 == 0o640


# bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls", "missing"], "missing does not exist: give a folder"),
        (["ls", "file"], "file is a file: give a folder"),
        (["ls", "empty"], "empty: give a folder of checkpoints, or a run's folder, which has them in model/"),
        (["info", "empty"], "no checkpoint in "),
        (["info", "run", "--step", "7"], "--step 7: no such checkpoint in "),
        (["verify", "run", "--step", "7"], "; the newest are 10, 20, 30"),
        (["verify", "run/model/20", "--step", "20"], "run/model/20 is the folder of step 20; leave --step out"),
        (["diff", "run", "missing"], "missing does not exist"),
        (["export", "run", "--safetensors", "file"], "--safetensors file already exists: give a new file"),
        (["export", "run", "--safetensors", "link"], "--safetensors link already exists: give a new file"),
        (
            ["export", "run", "--safetensors", "no/x"],
            "--safetensors no/x: the folder no does not exist: create it first",
        ),
        (
            ["export", "run", "--safetensors", "x", "--shard-size", "5"],
            "--shard-size: '5' is not a size: write a number and",
        ),
        (["export", "run", "--safetensors", "x", "--shard-size", "0GB"], "--shard-size 0GB: it must be at least 1 B"),
        (["export", "run", "--safetensors", "x", "--only", "("], "--only (: not a regular expression: "),
        (["export", "run", "--safetensors", "x", "--only", "W"], "--only W: none of 7 leaves matches; the first is "),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(run, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "run").symlink_to(run)
    before = sorted(tmp_path.rglob("*")), everything(run)
    status, lines, err = run_ckpt(capsys, *arguments)
    assert (status, lines, err.count("\n")) == (2, [], 1)
    assert message in err
    assert (sorted(tmp_path.rglob("*")), everything(run)) == before


@pytest.mark.parametrize("arguments", [[], ["ls"], ["export", "run"], ["info", "run", "--stop", "3"]])
def test_wrong_options_are_refused(capsys, arguments):
    try:
        status = main(["ckpt", *arguments])
    except SystemExit as raised:
        status = raised.code
    assert status == 2


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in ("ls", "info", "verify", "diff", "export"):
        assert f"ckpt {name} DIR" in shown


def test_it_stays_off_accelerators(run):
    """JAX told to use some that are not there would fail; the command takes the CPU all the same."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "jaxshard", "ckpt", "verify", str(run), "--step", "10"],
        env=os.environ | {"JAX_PLATFORMS": "cuda"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "step 10: intact\n"), done.stderr
