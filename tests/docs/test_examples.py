"""The files in examples/: each runs as its first lines say, and GPT-2's losses are those of plain optax."""

import ast
import functools
import importlib.util
import os
import re
import shlex
import socket
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from compiled_once import fast_flags
from pages import ROOT

EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
ALONE = [name for name in EXAMPLES if name != "several_hosts"]
STEPS = {"flax_nnx": 8, "gpt2": 12}  # for others 20
COMMAND = re.compile(r"^ {4}.*?\bpython (examples/\w+\.py.*?)(?: &)?$", re.M)
LOSS = re.compile(r"^ *step (\d+)  loss ([\d.]+)", re.M)
MEMORY = re.compile(r"^(?:each device|one device alone).* MB$", re.M)


def first_lines(name):
    return ast.get_docstring(ast.parse(EXAMPLES[name].read_text()), clean=False)


def start(name, folder, *options, **environment):
    """The first command of an example's first lines, outside of the checkout; any warning is an error."""
    script, *given = shlex.split(COMMAND.findall(first_lines(name))[0])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(ROOT / script), *given, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=kept | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment,
    )


def printed(process):
    out, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors[-6000:]
    return out


def runs(text):
    """The losses that each training in the text has printed, {step: loss}."""
    found = []
    for step, loss in LOSS.findall(text):
        if step == "1":
            found.append({})
        found[-1][int(step)] = float(loss)
    return found


def check(name, out):
    """The loss falls; it begins, and memory is, as the first lines say."""
    told = first_lines(name)
    losses = runs(out)[0]
    assert list(losses.values())[-1] < 0.85 * losses[1], out
    assert len(MEMORY.findall(out)) >= 2, out
    assert [line for line in MEMORY.findall(out) if f"    {line}\n" not in told] == []
    assert runs(out)[0][1] == pytest.approx(runs(told)[0][1], rel=0.02)


@pytest.mark.parametrize("name", ALONE)
def test_an_example_runs(name, tmp_path):
    options = ["--steps", str(STEPS.get(name, 20))]
    out = printed(start(name, tmp_path, *options, XLA_FLAGS=fast_flags()))
    check(name, out)
    if name == "lora":
        base, merged = map(float, re.findall(r"on other Python: loss ([\d.]+)", out))
        assert merged < 0.95 * base
    if name == "muon_and_adamw":
        (distance,) = re.findall(r"^params differ by (\S+)", out, re.M)
        assert float(distance) < 1e-4


@pytest.mark.nightly
@pytest.mark.parametrize("name", ALONE)
def test_an_example_comes_to_the_losses_that_it_promises(name, tmp_path):
    told, found = runs(first_lines(name)), runs(printed(start(name, tmp_path)))
    assert len(told) == len(found)
    for promised, losses in zip(told, found, strict=True):
        assert {step: losses[step] for step in promised} == pytest.approx(promised, rel=0.2)


def hosts(folder, count, *options):
    """What `count` processes of examples/several_hosts.py print, the first one's first."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    joined = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count), "XLA_FLAGS": fast_flags()}
    options = ["--out", str(folder / "saved"), *options]
    each = [start("several_hosts", folder, *options, JAX_PROCESS_ID=str(i), **joined) for i in range(count)]
    return [printed(process) for process in each]


def test_two_processes_train_and_one_goes_on(tmp_path):
    """What two have saved, one takes."""
    out, silent = hosts(tmp_path, 2, "--steps", "20")
    check("several_hosts", out)
    assert LOSS.findall(silent) + MEMORY.findall(silent) == []
    (on,) = hosts(tmp_path, 1, "--steps", "21")
    ((step, loss),) = LOSS.findall(on)
    assert step == "21"
    assert float(loss) < 0.85 * runs(out)[0][1]


@pytest.mark.parametrize("name", EXAMPLES)
def test_first_lines(name):
    """A command and what to expect, in a file that is short enough to copy."""
    told = first_lines(name)
    assert EXAMPLES[name].read_text().startswith(f'"""{told}')
    assert COMMAND.findall(told)[0].startswith(f"examples/{name}.py")
    assert "Expect" in told
    assert runs(told)
    assert len(EXAMPLES[name].read_text().splitlines()) < 150


@pytest.fixture(scope="module")
def gpt2():
    spec = importlib.util.spec_from_file_location("gpt2", EXAMPLES["gpt2"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain_losses(gpt2, size, rows, steps, rate):
    """As `gpt2.main`, by optax on one device."""
    params = jax.jit(functools.partial(gpt2.init, size=size))(jax.random.key(0))
    tx = gpt2.adamw(steps, rate)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(gpt2.loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    text = np.frombuffer("\n".join(gpt2.topics.values()).encode(), np.uint8)
    state, losses = tx.init(params), []
    for i in range(steps):
        params, state, loss = step(params, state, gpt2.batch_at(i, [text], rows, size))
        losses.append(float(loss))
    assert losses[-1] < 0.9 * losses[0]
    return losses


def toy(rows, steps):
    return ["--size", "toy", "--rate", "3e-3", "--rows", str(rows), "--steps", str(steps)]


@pytest.fixture(scope="module")
def toy_losses(gpt2):
    """Of one device in double precision, for so many rows and steps."""

    @functools.cache
    def losses(rows, steps):
        with jax.enable_x64(True), pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax.nn, "dot_product_attention", exact_attention)
            return plain_losses(gpt2, gpt2.SIZES["toy"], rows, steps, rate=3e-3)

    return losses


def exact_attention(q, k, v, *, is_causal):
    """JAX's own takes the softmax in single precision, whatever it is given."""
    assert is_causal
    scores = jax.numpy.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    scores = jax.numpy.where(np.tri(q.shape[1], dtype=bool), scores, -np.inf)
    return jax.numpy.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


@pytest.mark.parametrize(
    ("rows", "steps", "options"),
    [
        (8, 64, "zero2"),
        (8, 64, "zero3"),
        (16, 12, "zero2 --microbatches 2"),
        (16, 12, "hsdp --replicas 2 --microbatches 2"),
    ],
)
def test_gpt2_trains_as_on_one_device(gpt2, toy_losses, monkeypatch, x64, rows, steps, options):
    monkeypatch.setattr(jax.nn, "dot_product_attention", exact_attention)
    losses = gpt2.main([*toy(rows, steps), "--strategy", *options.split()])
    np.testing.assert_allclose(losses, toy_losses(rows, steps), rtol=1e-12)


def test_gpt2_in_bfloat16_with_masters(gpt2, toy_losses):
    losses = gpt2.main([*toy(16, 12), "--strategy", "zero3", "--bfloat16"])
    np.testing.assert_allclose(losses, toy_losses(16, 12), rtol=0.03)


@pytest.mark.nightly
@pytest.mark.optimized
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_gpt2_of_124m_trains_as_on_one_device(gpt2, monkeypatch, strategy):
    """In single precision, on short rows."""
    monkeypatch.setitem(gpt2.SIZES, "124M", gpt2.SIZES["124M"]._replace(length=128))
    losses = gpt2.main(["--rows", "8", "--steps", "10", "--strategy", strategy])
    want = plain_losses(gpt2, gpt2.SIZES["124M"], rows=8, steps=10, rate=6e-4)
    np.testing.assert_allclose(losses, want, rtol=1e-5)


@pytest.mark.parametrize(
    ("size", "num_params"),
    [("124M", 124_439_808), ("350M", 354_823_168), ("774M", 774_030_080), ("1558M", 1_557_611_200)],
)
def test_gpt2_has_the_params_of_the_published_one(gpt2, size, num_params):
    shapes = jax.eval_shape(functools.partial(gpt2.init, size=gpt2.SIZES[size]), jax.random.key(0))
    padded = (gpt2.SIZES[size].vocabulary - 50257) * gpt2.SIZES[size].width
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) - padded == num_params


def test_gpt2_reads_files_of_nanogpt_and_llm_c(gpt2, tmp_path):
    tokens = np.random.default_rng(0).integers(50257, size=3000).astype(np.uint16)
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(tokens)
    (tmp_path / "bare.bin").write_bytes(tokens.tobytes())
    (tmp_path / "headed.bin").write_bytes(header.tobytes() + tokens.tobytes())
    for name in ("bare.bin", "headed.bin"):
        np.testing.assert_array_equal(gpt2.read_tokens(tmp_path / name), tokens)


def test_gpt2s_batches_are_windows_of_one_file_each(gpt2):
    """And each window comes up, the first and the last of each file among them."""
    files = [np.arange(20), np.arange(100, 112), np.arange(4)]
    size = gpt2.Size(2, 64, vocabulary=256, length=8)
    rows = np.concatenate([gpt2.batch_at(step, files, 64, size) for step in range(20)])
    np.testing.assert_array_equal(np.diff(rows), 1)
    assert set(rows[:, 0].tolist()) == {*range(12), *range(100, 104)}


def test_gpt2s_batches_depend_on_seed_and_step_alone(gpt2):
    files, size = [np.random.default_rng(0).integers(256, size=1000)], gpt2.SIZES["toy"]
    first, second, other = (gpt2.batch_at(step, files, 4, size, seed) for step, seed in [(7, 0), (8, 0), (7, 1)])
    assert first.shape == (4, size.length + 1)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other)
    np.testing.assert_array_equal(gpt2.batch_at(7, files, 4, size, 0), first)


@pytest.mark.parametrize(
    ("tokens", "words"), [(range(60), "more than 64 tokens"), (range(256, 500), "is none of this size's 256")]
)
def test_gpt2_tells_wrong_files_before_anything_is_compiled(gpt2, tmp_path, count_compilations, tokens, words):
    np.asarray(tokens, np.uint16).tofile(tmp_path / "wrong.bin")

    def run():
        with pytest.raises(ValueError, match=words):
            gpt2.main([*toy(8, 1), "--data", str(tmp_path / "wrong.bin")])

    assert count_compilations(run)[0] == 0
