"""Programs compiled for machines that are not here, by the compilers that those would use."""

import functools
import json
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxshard
from jaxshard import aot, inspect, plan
from jaxshard.apps.config.config import Config, ModelConfig, ShardingConfig, TrainConfig
from jaxshard.cli.plan import of_config as plan_rows
from jaxshard.hardware import chips
from jaxshard.optimizer.state import init
from jaxshard.step.step import loss_of

LAYERS, WIDTH, HIDDEN, VOCABULARY = 2, 256, 512, 256  # cut in lanes of 128, as a TPU keeps them
CUT = P("data")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Reports of one test are not those of another, or of yesterday."""
    monkeypatch.setenv("JAXSHARD_CACHE", str(tmp_path / "reports"))
    return tmp_path / "reports"


# Names.


@pytest.mark.parametrize(
    ("name", "chip", "shape", "count"),
    [
        ("v5e:2x4", "v5e", (2, 4), 8),
        ("v5e:16x16", "v5e", (16, 16), 256),
        ("v6e:16x16", "v6e", (16, 16), 256),
        ("v5p:8x8x8", "v5p", (8, 8, 8), 512),
        ("v4:4x4x4", "v4", (4, 4, 4), 64),
        ("h100:8", "h100", (8,), 8),
        ("h100:4", "h100", (4,), 4),
        ("h100:4x8", "h100", (4, 8), 32),
        ("a100:8", "a100", (8,), 8),
        ("h200:8", "h200", (8,), 8),
        ("b200:2x8", "b200", (2, 8), 16),
        ("cpu:8", "cpu", (8,), 8),
        ("v5e:2x4*2", "v5e", (2, 4), 16),
        ("v5e:16x16*4", "v5e", (16, 16), 1024),
        ("v7x:2x2x1", "v7x", (2, 2, 1), 8),
        ("v7x:4x4x4*3", "v7x", (4, 4, 4), 384),
        ("h100:8*4", "h100", (4, 8), 32),
        ("gb200:72", "gb200", (72,), 72),
        ("gb300:72*8", "gb300", (8, 72), 576),
        ("mi300x:8", "mi300x", (8,), 8),
    ],
)
def test_names_of_machines(name, chip, shape, count):
    slices = int(name.partition("*")[2] or 1) if chip[0] == "v" else 1
    assert aot.machine(name) == aot.Machine(name, chips.chip(chip), shape, count, slices)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "v9:2x2",
            r"'v9:2x2' has an unknown chip, 'v9'; available: v4:4x4x4; v5e:2x4, .*h100:4x8 \(4 nodes of 8\).*cpu:8",
        ),
        ("h300:8", r"'h300:8' has an unknown chip, 'h300' \(did you mean h[12]00\?\); available: v4:4x4x4; .*cpu:8"),
        ("V5E", r"'V5E' has an unknown chip, 'V5E' \(did you mean v5e\?\); available: "),
        ("v5e", "is not a chip and a shape"),
        ("v5e:", "is not a chip and a shape"),
        ("v5e:2x", "is not a chip and a shape"),
        ("v5e:0x4", "is not a chip and a shape"),
        ("v5e:2 x 4", "is not a chip and a shape"),
        ("h100:-8", "is not a chip and a shape"),
        (8, "8 is not a chip and a shape"),
        ("v5e:2x2x2", r"'v5e:2x2x2' has 3 dims; v5e chips are joined in 2 dims; write, for example, v5e:2x4"),
        ("v5p:8x8", r"has 2 dims; v5p chips are joined in 3 dims; write, for example, v5p:2x2x1"),
        ("v5e:32x32", "has 1024 chips in a slice; a v5e pod has at most 256"),
        ("v7x:32x32x32", "has 32768 chips in a slice; a v7x pod has at most 9216"),
        ("v5e:2x4*0", "is not a chip and a shape"),
        ("v5e:2x4*2*2", "is not a chip and a shape"),
        ("h100:4x8*2", "has 3 dims; give nodes x GPUs of a node"),
        ("cpu:4*2", "has 2 dims; give the number of simulated devices"),
        ("gb200:80", r"has 80 GPUs in a node; a node has at most 72; write, for example, gb200:72, gb200:72\*8"),
        ("h100:16", r"has 16 GPUs in a node; a node has at most 8; write, for example, h100:8 \(a node of 8\)"),
        ("h100:2x2x8", "has 3 dims; give nodes x GPUs of a node"),
        ("cpu:2x4", "has 2 dims; give the number of simulated devices"),
    ],
)
def test_bad_names_are_refused_with_examples(name, says):
    with pytest.raises(ValueError, match=says):
        aot.machine(name)


def test_every_example_in_the_messages_is_a_machine():
    with pytest.raises(ValueError, match="available") as caught:
        aot.machine("?")
    listed = str(caught.value).split("available: ")[1].replace(";", ",").split(", ")
    named = [part.split(" ")[0] for part in listed]
    assert {aot.machine(name).chip.name for name in named} == set(chips.CHIPS)


def test_chips_are_known_by_name_and_their_figures_are_in_order():
    with pytest.raises(
        ValueError,
        match=r"'h300' is unknown; available: v4, v5e, v5p, v6e, v7x, a100, .*, gb200, gb300, mi300x, mi355x, cpu",
    ):
        chips.chip("h300")
    with pytest.raises(ValueError, match=r"'h10' is unknown; available: v4, .*; did you mean h100\?"):
        chips.chip("h10")
    for name, chip in chips.CHIPS.items():
        assert chip is chips.chip(name)
        assert chip.name == name
        assert set(chip.flops) == {"bfloat16", "float16", "float32"}
        assert min(chip.flops.values()) > chip.memory_bandwidth > chip.link_bandwidth >= chip.network_bandwidth > 0
        assert 2**30 < chip.memory_bytes < 300e9
        assert chip.source


# Devices.


def test_a_machine_without_a_compiler_here_is_told():
    with pytest.raises(ValueError, match=r"'mi300x:8' can be planned, but not compiled for"):
        aot.devices(aot.machine("mi300x:8"))


@pytest.mark.parametrize("name", ["v5e:2x4", "v6e:4x4", "v5p:2x2x2", "v4:2x2x2", "v7x:2x2x1", "v5e:2x4*2"])
def test_a_machine_has_as_many_devices_as_chips(name):
    machine = aot.machine(name)
    devices = aot.devices(machine)
    assert len(devices) == len(set(devices)) == machine.num_devices
    assert {d.platform for d in devices} == {"tpu"}


def test_a_topology_that_the_compiler_refuses():
    with pytest.raises(ValueError, match=r"rejects the topology 'v5e:3x3': .*not divisible.*for example v5e:2x4"):
        aot.devices(aot.machine("v5e:3x3"))


def test_cpu_devices_are_those_that_there_are():
    assert aot.devices(aot.machine("cpu:4")) == jax.devices("cpu")[:4]
    with pytest.raises(ValueError, match=r"needs 16 CPU devices, found 8; before JAX starts, .*num_cpu_devices\", 16"):
        aot.devices(aot.machine("cpu:16"))


@pytest.mark.parametrize(("name", "extra"), [("v5e:2x4", "aot-tpu"), ("h100:8", "aot-gpu")])
def test_a_missing_compiler_says_what_to_install(name, extra, monkeypatch):
    for package in ("libtpu", "jax_cuda13_plugin", "jax_cuda12_plugin"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(aot.CompilerMissingError, match=rf'pip install "jaxshard\[{extra}\]"') as caught:
        aot.devices(aot.machine(name))
    assert isinstance(caught.value, ImportError)


def test_two_processes_use_the_tpu_compiler_at_once_and_in_silence():
    """It locks /tmp/libtpu_lockfile; the one that comes second failed."""
    code = "from jaxshard import aot; print(len(aot.devices(aot.machine('v5e:2x4'))), flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as first:
        assert first.stdout.readline() == "8\n"  # holds it until its input ends
        with subprocess.Popen([sys.executable, "-c", code], **pipes) as second:
            assert second.communicate("\n") == ("8\n", "")
        first.communicate("\n")


# Reports.


def _lowered(machine, shape=(64, 256), spec=CUT, donate=(), unused=(3,), scale=2.0, reverse=False):
    devices = aot.devices(machine)
    mesh = jax.sharding.Mesh(np.array(devices[::-1] if reverse else devices), ("data",))
    placed = NamedSharding(mesh, spec)
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=placed)
    step = jax.jit(lambda x, y: x * scale, donate_argnums=donate, out_shardings=placed)
    return step.lower(x, jax.ShapeDtypeStruct(unused, jnp.float32))


def _fail(*_args, **_options):
    raise AssertionError("compiled again")


def test_a_report_is_made_once(cache, monkeypatch):
    machine = aot.machine("cpu:8")
    report = aot.report(_lowered(machine), machine)
    assert report == inspect.report(_lowered(machine).compile())
    assert report.platform == "cpu"
    (path,) = cache.iterdir()
    assert inspect.Report.from_dict(json.loads(path.read_text())) == report
    monkeypatch.setattr(jax.stages.Lowered, "compile", _fail)
    assert aot.report(_lowered(machine), machine) == report
    with pytest.raises(AssertionError, match="compiled again"):
        aot.report(_lowered(machine, shape=(128, 256)), machine)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"collectives": []}', "\x00\xff"])
def test_a_spoiled_file_is_made_anew(content, cache):
    machine = aot.machine("cpu:8")
    report = aot.report(_lowered(machine), machine)
    (path,) = cache.iterdir()
    whole = path.read_text()
    path.write_bytes(content.encode("latin-1"))
    assert aot.report(_lowered(machine), machine) == report
    assert [p.read_text() for p in cache.iterdir()] == [whole]


def test_another_program_has_another_key(cache):
    machine, smaller = aot.machine("cpu:8"), aot.machine("cpu:4")
    given = [
        {},
        {"shape": (128, 256)},
        {"spec": P(None, "data")},
        {"spec": P()},
        {"donate": (0,)},
        {"unused": (4,)},
        {"scale": 3.0},
        {"reverse": True},
    ]
    for options in given:
        aot.report(_lowered(machine, **options), machine)
    aot.report(_lowered(smaller), smaller)
    aot.report(_lowered(machine), machine, compiler_options={"xla_cpu_enable_fast_math": True})
    assert len(list(cache.iterdir())) == len(given) + 2


def test_another_machine_has_another_key(cache):
    reports = {name: aot.report(_lowered(aot.machine(name)), aot.machine(name)) for name in ("v5e:2x4", "v6e:2x4")}
    assert len(list(cache.iterdir())) == len(reports)
    assert {report.arguments for report in reports.values()} == {(64 * 256 * 4 // 8, 0)}


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAXSHARD_CACHE", str(tmp_path / "file" / "reports"))
    machine = aot.machine("cpu:8")
    with pytest.warns(UserWarning, match="set JAXSHARD_CACHE to a writable folder"):
        assert aot.report(_lowered(machine), machine).platform == "cpu"


def test_what_is_no_program_for_the_machine_is_refused(cache):
    machine = aot.machine("cpu:8")
    with pytest.raises(TypeError, match=r"aot\.report needs a lowered program, .* got Compiled"):
        aot.report(_lowered(machine).compile(), machine)
    with pytest.raises(ValueError, match=r"lowered for cpu, and 'v5e:2x4' is a machine of tpu; lower it for arrays on"):
        aot.report(_lowered(machine), aot.machine("v5e:2x4"))
    assert not cache.exists()


# The strategies, by the TPU's compiler.


def _loss(p, batch, marked=jaxshard.unshard):
    x = jaxshard.unshard(p["embedding"])[batch["x"]]

    @jax.checkpoint
    def layer(x, block):
        block = jaxshard.unshard(block)
        return x + jnp.tanh(x @ block["up"]) @ block["down"], None

    x, _ = jax.lax.scan(layer, x, p["blocks"])
    logits = x @ marked(p["head"])
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["y"]).mean()


def _step(strategy, machine, dtype, loss=_loss, mesh=None):
    """A training step lowered for a machine, its optimizer, its params and what is predicted of it."""
    if mesh is None:
        mesh = jaxshard.make_mesh(devices=aot.devices(machine), replica=2 if strategy == "hsdp" else 1)
    master = jnp.float32 if dtype == jnp.bfloat16 else None
    opt = getattr(jaxshard, strategy)(optax.adamw(1e-3), mesh, master_dtype=master)
    shapes = {
        "embedding": (VOCABULARY, WIDTH),
        "blocks": {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)},
        "head": (WIDTH, VOCABULARY),
    }
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, dtype), shapes, is_leaf=lambda x: isinstance(x, tuple))
    placed = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, opt.shardings(params).params
    )
    rows = jax.ShapeDtypeStruct((32, 16), jnp.int32)  # too many for an exchange of rows in the place of the table
    step, batch = jaxshard.train_step(loss, opt), {"x": rows, "y": rows}
    return step.lower(placed, opt.init(params), batch), opt, params, plan.predict(step, params, batch)


def _check(strategy, machine, dtype):
    lowered, opt, params, predicted = _step(strategy, machine, dtype)
    report = aot.report(lowered, machine)
    assert predicted.wire_bytes == pytest.approx(report.wire_bytes, rel=1e-2)
    assert (predicted.at_rest["params"], predicted.at_rest["state"]) == report.arguments[:2]
    at_rest = opt.layout(params).bytes_per_device
    rows = 2 * 32 * 16 * 4 // machine.num_devices
    assert report.arguments == (at_rest["params"], at_rest["state"], rows)
    assert sum(report.arguments) <= report.argument_bytes < sum(report.arguments) + 2**14  # what the tiles pad
    assert report.peak_bytes > sum(report.arguments)
    assert report.trips_known
    assert report.wire_bytes > 0
    return report


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "hsdp"])
def test_bytes_at_rest_and_sent_on_a_tpu_are_those_planned(strategy, dtype):
    report = _check(strategy, aot.machine("v5e:2x4"), dtype)
    assert report.platform == "tpu"
    assert report.flops > 0
    kinds = {c.kind for c in report.collectives if c.bytes > 1024}
    assert kinds >= {"all-reduce"} if strategy == "ddp" else kinds >= {"all-gather", "reduce-scatter"}


_STYLES = {
    "tensor": {"strategy": "tensor_parallel", "tensor": 2},
    "tensor, sequence, zero 1": {"strategy": "hybrid", "zero": 1, "tensor": 2, "sequence_parallel": True},
    "1f1b": {"strategy": "pipeline_parallel", "pipeline": 2},
    "3d, zero 2": {"strategy": "hybrid", "zero": 2, "tensor": 2, "pipeline": 2},
    "3d, zero 3": {"strategy": "hybrid", "zero": 3, "tensor": 2, "pipeline": 2},
}


@pytest.mark.parametrize("style", _STYLES)
def test_tensor_and_pipeline_parallel_on_a_tpu_are_as_planned(style):
    machine = aot.machine("v5e:2x4")
    sizes = {"layers": 4, "width": 512, "heads": 4, "hidden": 1024, "sequence_length": 64, "vocabulary": 1024}
    config = Config(model=ModelConfig(**sizes), sharding=ShardingConfig(**_STYLES[style]), train=TrainConfig(rows=32))
    target = plan.Target(machine.chip, 8, machine.chip.memory_bytes)
    mine = plan_rows.own(config, target)
    step, params, batch = plan_rows.building(config)(
        mine, jaxshard.make_mesh(**mine.sizes, devices=aot.devices(machine))
    )
    report = aot.report(step.lower(params, init(loss_of(step).setup, params), batch), machine)
    predicted = plan.predict(step, params, batch)
    assert predicted.wire_bytes == pytest.approx(report.wire_bytes, rel=1e-2)
    assert (predicted.at_rest["params"], predicted.at_rest["state"]) == report.arguments[:2]


@pytest.mark.parametrize("slices", [2, 4])
def test_bytes_inside_slices_and_between_them_are_those_planned(slices):
    """hsdp: gradients are reduced inside a slice, and their shards between slices; nothing else crosses them."""
    machine = aot.machine(f"v5e:2x4*{slices}")
    mesh = jaxshard.make_mesh(devices=aot.devices(machine), replica=slices)
    assert [len({d.slice_index for d in replica.flat}) for replica in mesh.devices[0]] == [1] * slices
    lowered, _, params, predicted = _step("hsdp", machine, jnp.float32, mesh=mesh)
    report = aot.report(lowered, machine)
    sent = predicted.costs.wire_bytes_by_axes()
    shard = sum(math.prod(x.shape) for x in jax.tree.leaves(params)) * 4 / 8
    assert report.wire_bytes_between_slices == pytest.approx(2 * (slices - 1) / slices * shard, rel=1e-2)
    assert report.wire_bytes_between_slices == pytest.approx(sent["replica"], rel=1e-2)
    assert report.wire_bytes == pytest.approx(predicted.wire_bytes, rel=1e-2)
    assert f"all-reduce between slices  {slices:>5}" in str(report)
    assert inspect.Report.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    by_axes = report.wire_bytes_by_axes(mesh)
    assert by_axes["between slices"] == report.wire_bytes_between_slices


@pytest.mark.parametrize(
    ("sizes", "over"),
    [
        ({}, "data"),
        ({"replica": 2}, "replica"),
        ({"replica": 4}, "replica"),
        ({"pipeline": 2, "tensor": 2}, "pipeline"),
        ({"tensor": 8}, "data"),
        ({"replica": 2, "slice_axes": "data"}, "data"),
        ({"tensor": 16, "slice_axes": ("tensor",)}, "tensor"),
    ],
)
def test_slow_links_get_replica_then_pipeline_then_data_or_what_is_named(sizes, over):
    mesh = jaxshard.make_mesh(devices=aot.devices(aot.machine("v5e:2x4*2")), **sizes)
    which = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    assert [a for i, a in enumerate(mesh.axis_names) if np.diff(which, axis=i).any()] == [over]


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"tensor": 16}, ("2 slices of 8 devices", "tensor would span their slow links", "tensor divides 8")),
        ({"slice_axes": "pipeline"}, ("slice_axes='pipeline' cannot split them",)),
        ({"slice_axes": "rows"}, ("'rows'", "pipeline, replica, data, tensor")),
    ],
)
def test_tensor_over_slices_and_axes_that_cannot_be_split_are_refused(sizes, says):
    with pytest.raises(ValueError, match="make_mesh") as error:
        jaxshard.make_mesh(devices=aot.devices(aot.machine("v5e:2x4*2")), **sizes)
    assert all(word in str(error.value) for word in says)


def test_slices_of_other_sizes_make_a_mesh_whose_tensor_axis_stays_within():
    """7 of 8 chips of one slice, and one slice more."""
    devices = aot.devices(aot.machine("v5e:2x4*2"))[2:]
    assert jaxshard.make_mesh(devices=devices, tensor=2).shape["data"] == 7
    with pytest.raises(ValueError, match="2 slices of 6 or 8 devices: tensor would span"):
        jaxshard.make_mesh(devices=devices, tensor=7)


def test_several_data_axes_over_a_whole_torus_are_not_all_reduced():
    """One scatter along all axes of v5p:2x2x2 would be, at twice the bytes."""
    machine = aot.machine("v5p:2x2x2")
    mesh = jax.sharding.Mesh(np.asarray(aot.devices(machine)).reshape(2, 4), ("slice", "data"))
    opt = jaxshard.zero2(optax.adamw(1e-3), mesh, data_axes=("slice", "data"))
    params = {"w": jax.ShapeDtypeStruct((1024, 8192), jnp.float32)}
    (leaf,) = opt.layout(params).params
    assert leaf.dims == ((-1, ("slice", "data")),)
    step = jaxshard.train_step(lambda p, rows: jnp.mean((rows @ p["w"]) ** 2), opt)
    rows = jax.ShapeDtypeStruct((16, 1024), jnp.float32)
    report = aot.report(step.lower(params, opt.init(params), rows), machine)
    assert report.wire_bytes == pytest.approx(2 * 7 / 8 * 4 * 1024 * 8192, rel=1e-2)
    assert plan.predict(step, params, rows).wire_bytes == pytest.approx(report.wire_bytes, rel=1e-2)


def test_the_tpu_compiler_overlaps_gathers_of_zero3_with_products():
    machine = aot.machine("v5e:2x4")
    report = aot.report(_step("zero3", machine, jnp.float32)[0], machine)
    hidden = [c for c in report.collectives if c.overlapped]
    assert {c.kind for c in hidden} == {"all-gather"}
    assert f"overlapped with compute              {len(hidden)} of {len(report.collectives)} collectives" in str(report)


@pytest.mark.parametrize("marked", [jaxshard.unshard, lambda head: head], ids=["marked", "unmarked"])
def test_the_tpu_compiler_gathers_the_head_after_the_loop(marked):
    """It gathered the head first of all, and kept it through the loop."""
    machine = aot.machine("v5e:2x4")
    lowered, *_ = _step("zero3", machine, jnp.float32, functools.partial(_loss, marked=marked))
    gathers = [c for c in aot.report(lowered, machine).collectives if c.kind == "all-gather"]
    assert [c.trips > 1 for c in gathers] == [False, True, True, False, True, True], gathers


@pytest.mark.parametrize("name", ["h100:8", "h100:2x8"])
def test_arguments_on_gpus_are_the_layouts_bytes(name):
    pytest.importorskip("jax_cuda13_plugin", reason='needs pip install "jaxshard[aot-gpu]" (4 GB)')
    report = _check("zero2", aot.machine(name), jnp.float32)
    assert (report.platform, report.argument_bytes) == ("gpu", sum(report.arguments))
    assert any(c.overlapped for c in report.collectives if c.kind == "reduce-scatter")


class Lowered:
    """Keeps the options that it is compiled with."""

    def compile(self, compiler_options):
        return compiler_options


@pytest.mark.parametrize(
    ("machine", "given", "options"),
    [
        ("v5e:2x4", None, None),
        ("v5e:2x4", {"a": 1}, {"a": 1}),
        ("v5p:2x2x1", None, {"xla_tpu_offload_gather_to_sparsecore": "false"}),
        ("v6e:2x4", {"xla_tpu_offload_gather_to_sparsecore": "true"}, {"xla_tpu_offload_gather_to_sparsecore": "true"}),
    ],
)
def test_programs_are_compiled_so_that_they_can_be_read(machine, given, options):
    assert aot.compiled(Lowered(), aot.machine(machine), compiler_options=given) == options


def test_what_never_ends_in_place_of_a_report_is_not_read(cache):
    machine = aot.machine("cpu:8")
    report = aot.report(_lowered(machine), machine)
    (path,) = cache.iterdir()
    path.unlink()
    os.mkfifo(path)
    assert aot.report(_lowered(machine), machine) == report
    assert path.is_file()
    path.write_text("[" * 100_000)
    assert aot.report(_lowered(machine), machine) == report
