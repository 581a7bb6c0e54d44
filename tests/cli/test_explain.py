"""`jaxshard explain`: each parameter's place and line, each collective's line and bytes, and wrong words."""

import importlib
import inspect as inspect_
import json
import re
import sys

import jax
import numpy as np
import pytest

from jaxshard import aot, inspect
from jaxshard.cli import main
from jaxshard.cli.explain import command as explain_command
from jaxshard.inspect.sources import Frame, frames
from jaxshard.loss import gradients, per_device
from jaxshard.optimizer import update
from jaxshard.optimizer.inner import update as inner
from jaxshard.optimizer.owners import rounds
from jaxshard.programs.source import part_of, place_of
from jaxshard.step import skips, step
from jaxshard.step.step import loss_of

USERS = """
import functools
import jax, jax.numpy as jnp, optax
import jaxshard

LAYERS, WIDTH, ROWS = 3, 96, 32


def layer(x, w):
    w = jaxshard.unshard(w)  # of each layer
    return jnp.tanh(x @ w), None


def loss_fn(params, batch):
    x = params["table"][batch["ids"]]  # of the table
    x = x @ params["first"]  # of the first
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    return jnp.mean((x @ params["last"] - batch["y"]) ** 2)  # of the last


def of_norm():
    def update(grads, state, params=None):
        norm = jnp.sqrt(sum(jnp.sum(g ** 2) for g in jax.tree.leaves(grads)))  # my norm
        return jax.tree.map(lambda g: g / (1 + norm), grads), state
    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def shaped(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def built(strategy, mesh=None, loss=loss_fn, **options):
    mesh = mesh or jaxshard.make_mesh()
    opt = getattr(jaxshard, strategy)(optax.chain(of_norm(), optax.adamw(1e-3)), mesh)
    params = {
        "table": shaped(64, WIDTH),
        "first": shaped(WIDTH, WIDTH),
        "layers": shaped(LAYERS, WIDTH, WIDTH),
        "last": shaped(WIDTH, 24),
        "bias": shaped(5),
    }
    batch = {"ids": shaped(ROWS, dtype="int32"), "y": shaped(ROWS, 24)}
    return jaxshard.train_step(loss, opt, donate=True, **options), params, batch


def zero3():
    return built("zero3")


def zero2():
    return built("zero2")


def zero1():
    return built("zero1", microbatches=2)


def on_three():
    return built("zero2", jaxshard.make_mesh(devices=jax.devices()[:3]))


def abstract():
    return built("zero3", jaxshard.mesh.abstract_mesh(8))


def arrays():
    step, *trees = zero3()
    return (step, *jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), trees))


def nothing():
    pass


def two():
    return 1, 2


def no_step():
    return "step", {}, {}


def unplaced():
    return jax.jit(lambda x: x), {"x": shaped(8)}


def own(devices=None, on_features=True):
    # A step by jax.value_and_grad.
    mesh = jaxshard.make_mesh(devices=devices)
    opt = jaxshard.zero3(optax.adamw(1e-3), mesh)
    params = {"layers": shaped(LAYERS, 512, 512), "last": shaped(512, 512)}
    params = opt.place(params)
    specs = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec(None, "data")
    rows, features = (jax.sharding.NamedSharding(mesh, spec) for spec in specs)
    batch = {"x": jax.ShapeDtypeStruct((4096, 512), jnp.float32, sharding=rows)}

    def of_all(params, batch):
        def block(x, w):
            x = jax.lax.with_sharding_constraint(x, features if on_features else rows)
            return jnp.tanh(x @ w), None  # of my layer

        x, _ = jax.lax.scan(jax.checkpoint(block), batch["x"], params["layers"])
        return jnp.mean((x @ params["last"]) ** 2)

    def train(params, state, batch):
        loss, grads = jax.value_and_grad(of_all)(params, batch)
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return train, params, opt.init(params), batch


def own_by_rows(devices=None):
    return own(devices, on_features=False)


def own_jitted():
    step, *arguments = own()
    return (jax.jit(step, donate_argnums=(0, 1)), *arguments)


def own_compiled():
    step, *arguments = own_jitted()
    return (step.lower(*arguments).compile(), *arguments)


def own_with_text():
    step, *arguments = own()
    return (lambda params, state, batch, mode: step(params, state, batch), *arguments, "fast")


def own_partial():
    step, params, *arguments = own()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    return (functools.partial(step, shapes), *arguments)


def with_state():
    step, params, batch = built("zero2")
    return step, params, optax.adam(1e-3).init(params), batch


def wants(x):
    return x


def fails():
    return {}["x"]  # it fails here


def leaves():
    raise SystemExit(3)


def wrong_loss():
    def loss(params, batch):
        return jnp.mean(params["first"].reshape(7, 7))  # a wrong shape
    return built("zero2", loss=loss)


def no_array():
    step, params, batch = zero2()
    return step, params | {"bias": jnp.tanh}, batch


value = 3
"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder with the user's modules; one for all tests, since programs are kept with the lines of their first.

    Of the session, for a worker may run other modules' tests in between.
    """
    made = tmp_path_factory.mktemp("users")
    (made / "mine.py").write_text(USERS)
    (made / "unclosed.py").write_text("def f(:\n")
    (made / "needs.py").write_text("\nimport nobody_has_this\n")
    (made / "ends.py").write_text("import sys\nsys.exit(5)\n")
    yield made
    for name in ("mine", "needs", "ends", "unclosed"):
        sys.modules.pop(name, None)


@pytest.fixture
def users(folder, monkeypatch):
    monkeypatch.chdir(folder)
    importlib.invalidate_caches()


def line(mark):
    """The place of the line that ends in a mark."""
    (number,) = [number for number, text in enumerate(USERS.split("\n"), 1) if text.endswith(f"# {mark}")]
    return f"mine.py:{number}"


def run(capsys, *words):
    """(exit status, standard output, standard error)"""
    status = main(["explain", *map(str, words)])
    return status, *capsys.readouterr()


def told(capsys, tmp_path, *words):
    """(the JSON that is written, standard output)"""
    file = tmp_path / "told.json"
    status, out, error = run(capsys, *words, "--json", file)
    assert (status, error) == (0, "")
    return json.loads(file.read_text()), out


def by_path(found):
    return {param["path"]: param for param in found["params"]}


def sums(found):
    """{(line or part, kind): (times, bytes sent)} of all that is more than a few numbers."""
    totals = {}
    for each in found["sent"]:
        if each["bytes"] > 1000:
            key = each["line"] or each["part"], each["kind"]
            times, sent = totals.get(key, (0, 0.0))
            totals[key] = times + each["times"], sent + each["wire_bytes"]
    return totals


LAYER, FIRST, LAST, TABLE = 4 * 96 * 96, 4 * 96 * 96, 4 * 96 * 24, 4 * 64 * 96  # bytes of the whole


def test_zero3(users, capsys, tmp_path):
    found, out = told(capsys, tmp_path, "mine:zero3")
    ring = 7 / 8
    assert sums(found) == {
        (line("of each layer"), "all-gather"): (6, 6 * ring * LAYER),  # forward, and again backward
        (line("of each layer"), "reduce-scatter"): (3, 3 * ring * LAYER),
        (line("of the first"), "all-gather"): (1, ring * FIRST),
        (line("of the first"), "reduce-scatter"): (1, ring * FIRST),
        (line("of the last"), "all-gather"): (1, ring * LAST),
        (line("of the last"), "reduce-scatter"): (1, ring * LAST),
        (line("of the table"), "all-gather"): (1, ring * TABLE),
        (line("of the table"), "reduce-scatter"): (1, ring * TABLE),
    }
    assert {each["line"] for each in found["sent"] if each["bytes"] < 1000} >= {line("my norm")}
    assert {each["axes"] for each in found["sent"]} == {"data"}
    layers = by_path(found)["layers"]
    assert layers["shape"] == [3, 96, 96]
    assert layers["bytes"] == {"params": 3 * LAYER // 8, "gradient": 3 * LAYER // 8, "state": 2 * 3 * LAYER // 8}
    assert (layers["gathered"], layers["lines"]) == ("gathered at unshard", [line("of each layer")])
    assert by_path(found)["first"]["lines"] == [line("of the first")]
    bias = by_path(found)["bias"]
    assert (bias["bytes"]["params"], bias["spec"], bias["lines"]) == (20, [], [])
    assert (found["compiled_for"], found["strategy"], found["sizes"]["data"]) == ("cpu:8", "zero3", 8)
    assert max(map(len, out.splitlines())) <= 80
    heading = f"{line('of each layer')}  w = jaxshard.unshard(w)  # of each layer\n"
    shown = out[out.index(heading) :].splitlines()
    assert re.fullmatch(r" +all-gather over data, f32 +6 x +36.9 kB +194 kB", shown[1]), shown[1]


def test_zero2_gathers_in_the_update(users, capsys, tmp_path):
    found, out = told(capsys, tmp_path, "mine:zero2")
    totals = sums(found)
    gathered = ("the update: new params are gathered", "all-gather")
    assert totals.pop(gathered) == (4, 7 / 8 * (3 * LAYER + FIRST + LAST + TABLE))
    assert {kind for _, kind in totals} == {"reduce-scatter"}
    assert {place for place, _ in totals} == {
        line(f"of {which}") for which in ("each layer", "the first", "the last")
    } | {line("of the table")}
    layers = by_path(found)["layers"]
    assert layers["bytes"] == {"params": 3 * LAYER, "gradient": 3 * LAYER // 8, "state": 2 * 3 * LAYER // 8}
    assert (layers["why"], layers["state_why"]) == ("zero2 keeps params replicated", "dim 1 by data")
    assert "    its gradient scattered at unshard" in out
    assert "    its gradient and state: dim 1 by data" in out


def test_gradients_that_are_reduced_after_all_microbatches_belong_to_a_part(users, capsys, tmp_path):
    found, _ = told(capsys, tmp_path, "mine:zero1")
    reduced = {place for place, kind in sums(found) if kind == "reduce-scatter"}
    assert reduced == {"the gradients' reduction, after the backward pass"}
    assert found["microbatches"] == 2


def test_bytes_are_those_of_the_report(users, capsys, tmp_path):
    """What is sent, line by line, is what `jaxshard.inspect` counts of the same program."""
    found, _ = told(capsys, tmp_path, "mine:zero3")
    sys.path.insert(0, ".")
    step, params, batch = importlib.import_module("mine").zero3()
    sys.path.remove(".")
    compiled = step.lower(params, loss_of(step).setup.abstract_state(params), batch).compile()
    assert sum(each["wire_bytes"] for each in found["sent"]) == inspect.wire_bytes(compiled)
    layout = step.layout(params, batch)
    assert found["totals"] == layout.bytes_per_device
    assert sum(each["bytes"]["state"] for each in found["params"]) == layout.bytes_per_device["state"] - 4  # the count


def test_nothing_is_compiled_if_not_asked(users, capsys, tmp_path, count_compilations):
    count, (found, out) = count_compilations(lambda: told(capsys, tmp_path, "mine:zero3", "--no-compile"))
    assert count == 0
    assert (found["sent"], found["compiled_for"]) == (None, None)
    assert "Collectives" not in out
    assert by_path(found)["last"]["lines"] == [line("of the last")]


@pytest.mark.parametrize("which", ["arrays", "abstract"])
def test_arrays_and_abstract_meshes_do_too(users, capsys, tmp_path, which):
    found, _ = told(capsys, tmp_path, f"mine:{which}")
    shapes, _ = told(capsys, tmp_path, "mine:zero3")
    assert sums(found) == sums(shapes)
    assert found["params"] == shapes["params"]


def test_for_a_tpu(users, capsys, tmp_path):
    found, out = told(capsys, tmp_path, "mine:zero3", "--compile", "v5e:2x4")
    assert (found["platform"], found["compiled_for"]) == ("tpu", "v5e:2x4")
    assert "compiled for v5e:2x4" in out
    totals = sums(found)
    assert totals[line("of each layer"), "all-gather"][0] == 6
    first, last = (int(line(mark).partition(":")[2]) for mark in ("of each layer", "of the last"))
    assert {place for place, _ in totals} <= {f"mine.py:{number}" for number in range(first, last + 1)}


@pytest.mark.parametrize("machine", ["cpu:8", "v5e:2x4"])
def test_what_is_held_at_the_peak(users, capsys, tmp_path, machine):
    found, out = told(capsys, tmp_path, "mine:zero3", "--compile", machine, "--peak")
    memory = found["memory"]
    assert memory["read"] == memory["arguments"] + sum(one["bytes"] for one in memory["held"])
    assert memory["held"] == sorted(memory["held"], key=lambda one: -one["bytes"])
    assert all(one["line"] or one["part"] for one in memory["held"])
    assert "as reported by the compiler" in out
    if machine == "cpu:8":
        assert memory["read"] == pytest.approx(memory["peak"], rel=0.2)
        lines = {line(f"of {which}") for which in ("each layer", "the first", "the last", "the table")}
        assert lines & {one["line"] for one in memory["held"]}
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("which", ["own", "own_jitted", "own_by_rows"])
def test_a_step_of_ones_own(users, capsys, tmp_path, which):
    found, out = told(capsys, tmp_path, f"mine:{which}", "--peak")
    listed = {each["path"]: each for each in found["arguments"]}
    assert listed["params/layers"] == {
        "path": "params/layers",
        "shape": [3, 512, 512],
        "dtype": "float32",
        "spec": [None, "data"],
        "bytes": 3 * 512 * 512 * 4 // 8,
    }
    assert {"state/0/mu/last", "batch/x"} <= set(listed)
    assert (found["strategy"], found["sizes"]["data"], found["params"]) == ("a step of your own", 8, [])
    assert sum(each["bytes"] for each in found["arguments"]) == found["memory"]["arguments"]
    assert any(each["line"] == line("of my layer") for each in found["sent"])
    assert "state/0/mu/last  float32[512,512]" in out
    by_rows = which == "own_by_rows"
    assert ("times what ZeRO-3 sends" in " ".join(out.split())) == (not by_rows), out
    assert bool(found["told"]) != by_rows


def test_a_step_of_ones_own_for_a_tpu(users, capsys, tmp_path):
    found, _ = told(capsys, tmp_path, "mine:own", "--compile", "v5e:2x4")
    assert (found["platform"], found["compiled_for"]) == ("tpu", "v5e:2x4")
    assert any(each["line"] == line("of my layer") for each in found["sent"])


def test_a_configuration(users, capsys, tmp_path, monkeypatch):
    (tmp_path / "tiny.toml").write_text(
        "[model]\nlayers = 2\nwidth = 64\nheads = 2\nhidden = 64\nsequence_length = 16\n"
    )
    words = (tmp_path / "tiny.toml", "--sharding.strategy", "zero3", "--optimizer.warmup-steps", "1")
    found, _ = told(capsys, tmp_path, *words)
    gathered = [each for each in found["sent"] if each["kind"] == "all-gather"]
    assert gathered
    assert all(re.search(r"apps/model/model.py:\d+$", each["line"]) for each in gathered)
    assert {each["code"] for each in gathered} == {"return params if early else jaxshard.unshard(params)"}
    head = by_path(found)["head/kernel"]
    assert head["gathered"] == "gathered at unshard"
    assert head["lines"] == [gathered[0]["line"]]


def test_a_step_that_does_not_fit(users, capsys, tmp_path, monkeypatch):
    def refuse(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 3 TB\nand a long list")

    monkeypatch.setattr(aot, "compiled", refuse)
    status, out, error = run(capsys, "mine:zero3", "--json", tmp_path / "x.json")
    assert (status, error) == (1, "")
    assert out.endswith("The compiler rejects the step: RESOURCE_EXHAUSTED: 3 TB\n")
    assert json.loads((tmp_path / "x.json").read_text())["sent"] is None


@pytest.mark.parametrize("columns", ["40", "200"])
def test_narrow_and_wide_terminals(users, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    status, out, _ = run(capsys, "mine:zero2")
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80
    assert out.count("…") == 0
    for number in ("36.9 kB", "the update: new params are gathered", "combined by"):
        assert number in " ".join(out.split())


# Wrong words, and functions that return something else.


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["mine:nothing"], "mine:nothing returned a NoneType: it must return (step, params, batch, *more)"),
        (["mine:two"], "mine:two returned a tuple of 2: it must return"),
        (["mine:no_step"], "as the step: it must return"),
        (["mine:unplaced"], "no argument of this step of your own is on a mesh: place params with"),
        (
            ["mine:own_jitted", "--compile", "v5e:2x4"],
            "on a mesh that is not of v5e:2x4: let it use the machine's devices",
        ),
        (
            ["mine:own_compiled"],
            "mine:own_compiled: the step is already compiled: return the function, or jax.jit of it",
        ),
        (["mine:own_with_text"], "mode of the step holds a str, which JAX does not trace: let the step close over it"),
        (["mine:own_partial"], "the step is a functools.partial that holds shapes: pass them as arguments"),
        (["mine:with_state"], "returned an optimizer's state where the batch belongs; the command makes the state"),
        (["mine:wants"], "wants must take no arguments (missing a required argument: 'x')"),
        (["mine:value"], "value is not a function, but of type int"),
        (["mine:zero4"], "mine has no zero4; did you mean 'zero"),
        (["mine:fails"], f"mine:fails: {line('it fails here')}: KeyError: 'x'"),
        (["mine:leaves"], "it ended the program with SystemExit(3)"),
        (["mine:wrong_loss"], f"{line('a wrong shape')}: TypeError: cannot reshape"),
        (["mine:no_array"], "bias is a PjitFunction; every leaf must be an array"),
        (["unclosed:f"], "unclosed.py:1: SyntaxError: invalid syntax"),
        (["needs:f"], "needs.py:2: ModuleNotFoundError: No module named 'nobody_has_this'"),
        (["ends:f"], "with SystemExit(5): put code that must not run on import under"),
        (["nobody:f"], "no module 'nobody' in this folder or among the installed packages"),
        (["mine.deeper:f"], "no module 'mine.deeper' in this folder"),
        (["mine.py:f"], "give a module and a function as Python imports them, such as mine:build"),
        (["mine:"], "such as mine:build"),
        ([":f"], "such as train:build"),
        (["nobody"], "the file does not exist; write a function as MODULE:FUNCTION"),
        (["nobody.toml"], "cannot read the configuration 'nobody.toml'"),
        (
            ["mine:on_three", "--compile", "cpu:8"],
            "makes a mesh of 3 devices (pipeline 1, replica 1, data 3, tensor 1)",
        ),
        (["mine:zero3", "--compile", "cpu:800"], "found 8"),
        (["mine:zero3", "--compile", "h10:8"], "'h10:8' has an unknown chip, 'h10' (did you mean h"),
        (["mine:zero3", "--compile", "cpu:8", "--no-compile"], "exclude each other: give one of them"),
        (["mine:zero3", "--peak", "--no-compile"], "--peak reads the compiled step, and --no-compile compiles nothing"),
        (["mine:zero3", "--model.layers", "2"], "--model.layers is for the reference model: mine:zero3 makes its own"),
        (["mine:zero3", "--data", "x"], "--data is for the reference model"),
        (["mine:zero3", "--json", "/"], "--json /: Is a directory"),
        (["--sharding.data", "3"], "do not make 8 devices"),
        (["--no-compile=1"], "--no-compile takes no value"),
        (["mine:zero3", "more"], "unknown argument 'more'"),
        (["--compil", "cpu:8"], "unknown option --compil; the nearest known one is --compile"),
        (["--compile"], "--compile needs a value"),
    ],
)
def test_what_is_wrong_is_told(users, capsys, words, says):
    try:
        status, out, error = run(capsys, *words)
    except SystemExit as end:
        status, (out, error) = end.code, capsys.readouterr()
    assert (status, out) == (2, ""), error
    assert says in error
    assert error.startswith("jaxshard explain: ")
    assert "Traceback" not in error


def test_without_the_gpu_compiler_the_cure_is_told(users, capsys, monkeypatch):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    status, _, error = run(capsys, "mine:zero3", "--compile", "h100:8")
    assert status == 2
    assert 'pip install "jaxshard[aot-gpu]"' in error


def test_what_it_changes_of_jax_and_python_it_takes_back(users, capsys):
    before = jax.config.jax_platforms, jax.config.jax_traceback_in_locations_limit, list(sys.path)
    run(capsys, "mine:fails")
    assert (jax.config.jax_platforms, jax.config.jax_traceback_in_locations_limit, list(sys.path)) == before


# Where lines come from.

HEAD = """HloModule m, num_partitions=2

FileNames
1 "/home/me/train.py"
2 "/lib/other.py"

FunctionNames
1 "loss"
2 "helper"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=4 end_column=9}
2 {file_name_id=2 function_name_id=2 line=7 end_line=7 column=1 end_column=2}

"""
BODY = """
ENTRY e {
  p = f32[8]{0} parameter(0), metadata={op_name="p"}
  q = f32[8]{0} negate(p), metadata={op_name="q" stack_frame_id=1}
  a = f32[16]{0} all-gather(p), dimensions={0}, metadata={op_name="a" stack_frame_id=2}
  b = (f32[8]{0}, f32[8]{0}) all-reduce(p, q), metadata={op_name="b" stack_frame_id=2}
  c = f32[8]{0} all-reduce(q)
  d = f32[8]{0} all-reduce(p), metadata={op_name="d" source_file="/home/me/old.py" source_line=3}
  h = f32[4]{0} fusion(q), kind=kLoop, calls=inside
  ROOT x = f32[8]{0} all-reduce(p)
}
"""
INSIDE = """
inside {
  i = f32[8]{0} parameter(0)
  j = f32[12]{0} pad(i)
  k = f32[12]{0} all-reduce(j)
}
"""
OWN, HELPER = Frame("/home/me/train.py", 12, "loss"), Frame("/lib/other.py", 7, "helper")


@pytest.mark.parametrize("parents", [(1, 2), (0, 1)])  # XLA counts them from 1 or from 0
def test_stacks_are_read_from_the_head(parents):
    links = [f"{{file_location_id={number} parent_frame_id={parent}}}" for number, parent in enumerate(parents, 1)]
    table = f"StackFrames\n1 {links[0]}\n2 {links[1]}\n"
    assert frames(HEAD + table + INSIDE + BODY) == {
        "a": [(HELPER, OWN)],
        "b": [(HELPER, OWN), (OWN,)],  # the compiler's own, and that of an operand
        "c": [(OWN,)],  # of its operand, since it has none
        "d": [(Frame("/home/me/old.py", 3, ""),)],
        "k": [(OWN,)],  # of what the fusion is given
        "x": [],
    }


def test_the_innermost_line_of_the_users_is_taken():
    ours, jaxs = explain_command.__file__.replace("cli/explain/command", "loss/unshard"), jax.__file__
    optax = sys.modules["optax"].__file__
    entrance = explain_command.__file__.replace("cli/explain/command", "loss/loss_program")
    own, library = ("/home/me/a.py", 3), (optax, 9)
    assert place_of([(jaxs, 1), (ours, 2), own, ("/home/me/b.py", 4)]) == ("/home/me/a.py:3", "")
    assert place_of([library, own]) == ("/home/me/a.py:3", "optax/__init__.py:9")
    assert place_of([library, (entrance, 5), own]) == ("", "optax/__init__.py:9")  # who called jaxshard
    assert place_of([(np.__file__, 1), ("<frozen runpy>", 2), (json.__file__, 3)]).own == ""


@pytest.mark.parametrize(
    ("fn", "within", "says"),
    [
        (skips.judged, "", "the check that all is finite"),
        (update._to_params, "", "the update: new params are gathered"),
        (update.advance, ".<locals>.<lambda>", "the update"),
        (rounds.Rounds.run, "", "the update: matrices are sent to their owners and back"),
        (inner.update, "", "the update"),
        (per_device.DeviceLoss._finish, "", "the gradients' reduction, after the backward pass"),
        (per_device.DeviceLoss._reduced, ".<locals>.average", "the mean of the loss over devices"),
        (per_device.DeviceLoss._at_the_start, ".<locals>.<listcomp>", "params are gathered once per step"),
        (gradients.LossFunction.measure, ".<locals>.body", "the gradients"),
        (per_device.DeviceLoss.run, "", ""),
    ],
)
def test_parts_of_a_step_say_themselves_what_they_are(fn, within, says):
    """Of functions inside each other a function's own words come first, then those of the innermost module."""
    frame = (inspect_.getsourcefile(fn), fn.__qualname__ + within)
    around = [(step.__file__, "TrainStep._step"), (jax.__file__, "jit")]
    assert part_of([frame]) == part_of([*around, frame, *around]) == says
    outer = (gradients.__file__, "LossFunction.measure")
    assert part_of([frame, outer]) == (says or "the gradients")
