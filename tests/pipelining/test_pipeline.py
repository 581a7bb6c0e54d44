"""Stages over the pipeline axis: the same loss and gradients under every schedule, its ticks, bytes and refusals."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from matplotlib import image
from oracle import assert_close
from parallel import Model

import jaxshard
from jaxshard import inspect
from jaxshard.pipelining.timetable import Plan, cells, chart, draw

GPIPE = Model(schedule="gpipe", num_microbatches=4)
GPIPE_STAGE = dataclasses.replace(GPIPE, remat="stage")
ONE_F_ONE_B = Model(schedule="1f1b", num_microbatches=4)
FEW = dataclasses.replace(ONE_F_ONE_B, num_microbatches=2)  # fewer than stages
INTERLEAVED = Model(schedule="interleaved", num_microbatches=4, virtual=2)
MODELS = {"gpipe": GPIPE, "gpipe-stage": GPIPE_STAGE, "1f1b": ONE_F_ONE_B, "few": FEW, "interleaved": INTERLEAVED}


def make(model, zero=0, tx=None, devices=None, **sizes):
    tx = optax.sgd(0.1) if tx is None else tx
    return jaxshard.hybrid(tx, jaxshard.make_mesh(devices=devices, **sizes), model.specs, zero=zero, min_shard_size=1)


@functools.cache
def truth(model, seed=0):
    """(loss, gradients) of plain JAX on one device, in the model's own shapes."""
    plain = model.plain()
    loss, grads = jax.jit(jax.value_and_grad(plain.loss))(plain.params(), model.batch(seed))
    if model.virtual > 1:
        grads |= {"blocks": jax.tree.map(lambda x: x.reshape(model.virtual, -1, *x.shape[1:]), grads["blocks"])}
    return {"loss": loss, "grads": grads}


def gradients(model, opt, **options):
    loss, grads = jaxshard.value_and_grad(model.loss, opt, **options)(opt.place(model.params()), model.batch())
    return {"loss": loss, "grads": grads}


# The same numbers.


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_every_gradient(name, zero):
    with jax.enable_x64(True):
        model = MODELS[name]
        assert_close(gradients(model, make(model, zero, pipeline=4)), truth(model), 1e-12)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_with_params_asked_for_inside_the_stages(name, zero, tied):
    """With 1f1b and ZeRO-2, 3 too, which DeepSpeed refuses; a tied embedding is summed once."""
    with jax.enable_x64(True):
        model = dataclasses.replace(MODELS[name], unshard=True, tied=tied, sequence=True)
        opt = make(model, zero, pipeline=2, tensor=2)
        assert_close(gradients(model, opt), truth(model), 1e-12)
        layout = jaxshard.value_and_grad(model.loss, opt).layout(opt.place(model.params()), model.batch())
        if zero >= 2:
            assert {how.split(":")[0] for how in layout.gathers.values() if "unshard" in how} == {
                "gathered at unshard" if zero == 3 else "its gradient scattered at unshard"
            }
            assert not [how for how in layout.gathers.values() if "at its first use" in how]


@pytest.mark.parametrize("name", MODELS)
def test_on_one_stage_and_on_no_mesh_it_is_a_loop(name):
    with jax.enable_x64(True):
        model = MODELS[name]
        loss, grads = jax.jit(jax.value_and_grad(model.loss))(model.params(), model.batch())
        assert_close({"loss": loss, "grads": grads}, truth(model), 1e-12)
        assert_close(gradients(model, make(model, 2, tensor=2)), truth(model), 1e-12)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_evaluation_runs_forward_alone(name):
    with jax.enable_x64(True):
        model = dataclasses.replace(MODELS[name], unshard=True)
        opt = make(model, 3, pipeline=4)
        evaluate = jaxshard.evaluate(model.loss, opt)
        params = opt.place(model.params())
        assert float(evaluate(params, model.batch())) == pytest.approx(float(truth(model)["loss"]), rel=1e-13)
        text = jax.jit(evaluate).lower(params, model.batch()).compile().as_text()
        assert trips(text) == [Plan(4, 4, model.virtual).num_ticks]


def test_microbatches_around_the_pipeline_are_whole_flushes():
    with jax.enable_x64(True):
        model = dataclasses.replace(ONE_F_ONE_B, num_microbatches=2)
        for zero in (0, 2):
            found = gradients(model, make(model, zero, pipeline=4), microbatches=2)
            assert_close(found, truth(model), 1e-12)


MESHES = {
    "2x2x2": {"pipeline": 2, "tensor": 2},
    "1x4x2": {"tensor": 2},
    "4x1x2": {"pipeline": 4, "tensor": 2},
    "2x4x1": {"pipeline": 2},
    "1x1x8": {"tensor": 8},
    "8x1x1": {"pipeline": 8},
    "1x8x1": {},
}
WIDE = Model(heads=8, width=16, hidden=16, vocabulary=16, schedule="1f1b", num_microbatches=2)


@functools.cache
def trained_on_one_device(steps):
    tx, plain = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.01)), WIDE.plain()
    params, state = plain.params(), tx.init(plain.params())

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(plain.loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for i in range(steps):
        params, state, loss = step(params, state, plain.batch(i))
    return {"params": params, "state": state, "loss": loss}


@functools.cache
def truth_of_wide(dtype):
    plain = WIDE.plain()
    return dict(
        zip(("loss", "grads"), jax.jit(jax.value_and_grad(plain.loss))(plain.params(dtype), plain.batch()), strict=True)
    )


@pytest.mark.parametrize("sizes", MESHES)
def test_loss_and_every_gradient_on_every_mesh(sizes):
    for dtype, bound in ((np.float64, 1e-10), (np.float32, 2e-5)):
        with jax.enable_x64(dtype == np.float64):
            opt = make(WIDE, 2, **MESHES[sizes])
            run = jaxshard.value_and_grad(WIDE.loss, opt)
            loss, grads = run(opt.place(WIDE.params(dtype)), WIDE.batch())
            assert_close({"loss": loss, "grads": grads}, truth_of_wide(dtype), bound)


@pytest.mark.parametrize(("sizes", "zero"), [(name, i % 4) for i, name in enumerate(MESHES)] + [("2x2x2", 3)])
def test_ten_steps_of_adamw_with_clipping(sizes, zero):
    """Params and state as of one device; what is replicated has the same bits on all devices."""
    with jax.enable_x64(True):
        tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.01))
        opt = make(WIDE, zero, tx, **MESHES[sizes])
        step = jaxshard.train_step(WIDE.loss, opt)
        params, state = opt.place(WIDE.params()), opt.init(WIDE.params())
        for i in range(10):
            params, state, metrics = step(params, state, WIDE.batch(i))
        assert_close({"params": params, "state": state, "loss": metrics["loss"]}, trained_on_one_device(10), 1e-10)
        for leaf in jax.tree.leaves((params, state)):
            copies = {}
            for shard in leaf.addressable_shards:
                copies.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
            assert all(len(bits) == 1 for bits in copies.values())


@pytest.mark.parametrize(("schedule", "zero", "virtual"), [("gpipe", 2, 1), ("1f1b", 3, 1), ("interleaved", 2, 2)])
def test_the_loss_scale_reaches_the_backward_pass_of_every_schedule(schedule, zero, virtual):
    """Gradients too small for float16, unless they are scaled where the schedule starts its own backward pass."""
    rng = np.random.default_rng(0)
    shape = (virtual, 8 // virtual) if virtual > 1 else (8,)
    params = {"w": rng.normal(size=(*shape, 8, 8)).astype("f2") / 2, "s": rng.normal(size=(8, 8)).astype("f2") / 2}
    x = rng.normal(size=(16, 8)).astype("f2")

    def stage(blocks, x, info):
        blocks = jaxshard.unshard(blocks)
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, blocks)[0]

    def loss(params, x):
        last = lambda s, x, m, info: jnp.mean((x @ jaxshard.unshard(s)).astype("f") ** 2) * 2.0**-24  # noqa: E731
        how = {"schedule": schedule, "virtual": virtual, "num_microbatches": 4}
        return jaxshard.pipeline(stage, lambda s, m, info: m, last, params["w"], params["s"], x, **how)

    moved = []
    for dtype, options in (("f2", MASTERS | {"loss_scale": SCALE}), ("f4", {}), ("f2", MASTERS)):
        mesh = jaxshard.make_mesh(pipeline=4)
        specs = [("w", P(None, "pipeline") if virtual > 1 else P("pipeline"))]
        opt = jaxshard.hybrid(optax.sgd(2.0**15), mesh, specs, zero, min_shard_size=1, **options)
        given = jax.tree.map(lambda p: p.astype(dtype), params)
        after, state, metrics = jaxshard.train_step(loss, opt)(opt.place(given), opt.init(given), x.astype(dtype))
        assert not metrics["skipped"]
        after = state.extra["master"] if options else after
        moved.append(jax.tree.map(lambda new, old: np.asarray(new, "f") - old.astype("f"), after, params))
    assert_close(moved[0], moved[1], 0.02)
    with pytest.raises(AssertionError):  # what the scale is for
        assert_close(moved[2], moved[1], 0.02)


MASTERS, SCALE = {"master_dtype": "float32"}, jaxshard.LossScale(initial=2.0**15)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_whole_numbers_go_along_with_the_activation(schedule):
    """Numbers of segments, say: they have no gradients."""
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(4, 3, 8)), "s": rng.normal(size=(8,))}
    batch = {"x": rng.normal(size=(16, 8)), "segment": rng.integers(0, 3, 16)}

    def plain(params, batch):
        x = batch["x"] * params["s"]
        for w in params["w"]:
            x = jnp.tanh(x + w[batch["segment"]])
        return jnp.mean((x * params["s"]) ** 2)

    def loss(params, batch):
        def stage(blocks, x, info):
            return jax.lax.scan(lambda x, w: (x | {"h": jnp.tanh(x["h"] + w[x["segment"]])}, None), x, blocks)[0]

        def first(s, rows, info):
            return {"h": rows["x"] * s, "segment": rows["segment"]}

        def last(s, x, rows, info):
            return jnp.mean((x["h"] * s) ** 2)

        how = {"schedule": schedule, "num_microbatches": 4}
        return jaxshard.pipeline(stage, first, last, params["w"], params["s"], batch, **how)

    with jax.enable_x64(True):
        opt = jaxshard.hybrid(optax.sgd(0.1), jaxshard.make_mesh(pipeline=4), [("w", P("pipeline"))])
        assert_close(jaxshard.value_and_grad(loss, opt)(params, batch), jax.value_and_grad(plain)(params, batch), 1e-12)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 4])
def test_a_loss_in_bfloat16_is_summed_in_float32(schedule, stages):
    """In its own type the sum of 512 microbatches would be 11 % off."""

    def loss(w, batch):
        last = lambda s, x, m, i: jnp.mean(x).astype(jnp.bfloat16)  # noqa: E731
        how = {"schedule": schedule, "num_microbatches": 512}
        return jaxshard.pipeline(lambda b, x, i: x + jnp.sum(b), lambda s, m, i: m, last, w, (), batch, **how)

    mesh = jaxshard.make_mesh(pipeline=stages, devices=jax.devices()[:stages])
    opt = jaxshard.ddp(optax.sgd(0.1), mesh, specs=P("pipeline"))
    batch = np.random.default_rng(0).uniform(2, 4, (512, 1)).astype("f")
    found = jaxshard.evaluate(loss, opt)(np.zeros((4, 1), "f"), batch)
    assert float(found) == pytest.approx(float(batch.mean()), rel=1e-3)


@pytest.mark.parametrize(("schedule", "zero"), [("gpipe", 3), ("1f1b", 2)])
def test_stages_whose_layers_are_left_to_xla(schedule, zero):
    """Pipeline by hand, tensor by XLA's partitioner."""
    rng = np.random.default_rng(0)
    params = {"e": rng.normal(size=(4, 8)), "blocks": rng.normal(size=(4, 8, 8)), "h": rng.normal(size=(8, 4))}
    batch = {"x": rng.normal(size=(16, 4)), "y": rng.normal(size=(16, 4))}

    def loss(params, batch):
        def stage(blocks, x, info):
            return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, blocks)[0]

        def last(shared, x, rows, info):
            return jnp.mean((x @ shared["h"] - rows["y"]) ** 2)

        shared, how = {"e": params["e"], "h": params["h"]}, {"num_microbatches": 2, "schedule": schedule}
        return jaxshard.pipeline(
            stage, lambda s, rows, info: rows["x"] @ s["e"], last, params["blocks"], shared, batch, **how
        )

    with jax.enable_x64(True):
        specs, mesh = [("blocks", P("pipeline", None, "tensor"))], jaxshard.make_mesh(pipeline=2, tensor=2)
        opt = jaxshard.hybrid(optax.sgd(0.1), mesh, specs, zero, auto_axes="tensor", min_shard_size=1)
        assert_close(jaxshard.value_and_grad(loss, opt)(params, batch), jax.value_and_grad(loss)(params, batch), 1e-12)


# The schedule.


SIZES = itertools.product((1, 2, 3, 4), (1, 2, 3, 4, 8), (1, 2, 3))
PLANS = [Plan(s, m, v) for s, m, v in SIZES if v == 1 or m % s == 0]


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: f"{p.num_stages}-{p.num_microbatches}-{p.virtual}")
def test_every_chunk_of_every_microbatch_once_in_order(plan):
    forward, backward = {}, {}
    for tick, stage in itertools.product(range(plan.num_ticks), range(plan.num_stages)):
        for done, work in ((forward, plan.forward(tick, stage)), (backward, plan.backward(tick, stage))):
            if work.busy:
                key = int(work.round) * plan.num_stages + stage, int(work.microbatch)
                assert key not in done
                done[key] = tick
    chunks = plan.num_stages * plan.virtual
    assert len(forward) == len(backward) == chunks * plan.num_microbatches
    for (chunk, microbatch), tick in forward.items():
        if chunk:  # what it takes was passed on one tick before
            assert forward[chunk - 1, microbatch] == tick - 1
        late = backward[chunk, microbatch] + plan.delay
        if chunk + 1 < chunks:
            assert backward[chunk + 1, microbatch] + plan.delay == late - 1
        else:  # the loss is there in the tick in which its gradient is wanted
            assert late == tick
        assert late - tick < plan.num_kept
        work = plan.backward(late - plan.delay, chunk % plan.num_stages)
        assert plan.forward_tick(work, chunk % plan.num_stages) == tick


@pytest.mark.parametrize(("schedule", "virtual"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_the_chart_as_text_and_picture(schedule, virtual, tmp_path):
    """Every work is in the chart at its tick; the picture has a box for each, in as many colours."""
    plan, path = Plan(4, 4, virtual), tmp_path / "chart.png"
    lines = [line.split() for line in chart(plan, schedule).splitlines()]
    rows = [line[-len(lines[0]) + 1 :] for line in lines[1:]]
    done = {(cell.stage, cell.direction, cell.tick): cell for cell in cells(plan, schedule)}
    assert len(done) == 2 * 4 * 4 * virtual
    for (stage, direction, tick), cell in done.items():
        turn = f".{cell.chunk // 4}" if virtual > 1 else ""
        assert rows[2 * stage + (direction == "backward")][tick] == f"{cell.microbatch}{turn}"
    assert sum(name != "." for row in rows for name in row) == len(done)
    draw(plan, schedule, path)
    pixels = (255 * image.imread(path)[..., :3]).round().astype(int)
    colours, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_counts=True)
    assert len([count for count in counts if count > 200]) > 2 * 4  # each microbatch's, forward and backward
    assert len(colours) > 2 * 4


def trips(text):
    """The trip counts of all loops that pass activations on, by compiled program."""
    return [c.trips for c in inspect.collectives(text) if c.kind == "collective-permute"]


@pytest.mark.parametrize("name", MODELS)
def test_ticks_of_the_compiled_program(name):
    """v M + S - 1 in each direction, for every schedule."""
    model = MODELS[name]
    opt = make(model, pipeline=4)
    params = opt.place(model.params(np.float32))
    text = jax.jit(jaxshard.value_and_grad(model.loss, opt)).lower(params, model.batch()).compile().as_text()
    sent = [c for c in inspect.collectives(text) if c.kind == "collective-permute"]
    plan = Plan(4, model.num_microbatches, model.virtual)
    assert sum(c.trips for c in sent) == 2 * plan.num_ticks
    assert all(c.trips_known for c in sent)


# What it costs.


def test_wire_bytes_of_the_pipeline():
    """2 (v M + S - 1) activations, and the shared gradients' all-reduce."""
    for model in (GPIPE, ONE_F_ONE_B, INTERLEAVED):
        model = dataclasses.replace(model, width=64, length=16, hidden=64, vocabulary=16)
        opt = make(model, pipeline=4, devices=jax.devices()[:4])
        params = opt.place(model.params(np.float32))
        compiled = jax.jit(jaxshard.value_and_grad(model.loss, opt)).lower(params, model.batch()).compile()
        activation = 16 // model.num_microbatches * 16 * 64 * 4
        shared = (2 * 16 * 64 + 64) * 4
        passed = 2 * Plan(4, model.num_microbatches, model.virtual).num_ticks * activation
        found = inspect.report(compiled).wire_bytes_by_axes(opt.mesh)
        assert set(found) == {"pipeline"}
        assert found["pipeline"] == pytest.approx(passed + 2 * 3 / 4 * shared, rel=0.02)


LARGER = {"width": 64, "length": 16, "hidden": 128, "vocabulary": 16}


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize(
    ("name", "zero", "sizes"),
    [("gpipe", 3, {"pipeline": 2}), ("1f1b", 1, {"pipeline": 4}), ("interleaved", 2, {"pipeline": 2})],
)
def test_wire_bytes_along_every_axis(name, zero, sizes, sequence):
    """The sum of the formulas, of one pass of gradients: stages, layers shared out over tensor, and ZeRO over data."""
    model = dataclasses.replace(MODELS[name], sequence=sequence, **LARGER)
    opt = make(model, zero, tensor=2, **sizes)
    params = opt.place(model.params(np.float32))
    compiled = jax.jit(jaxshard.value_and_grad(model.loss, opt)).lower(params, model.batch()).compile()
    num_stages, num_data = opt.mesh.shape["pipeline"], opt.mesh.shape["data"]
    plan = Plan(num_stages, model.num_microbatches, model.virtual)
    ticks, heads = plan.num_ticks, plan.num_ticks - (0 if name == "gpipe" else plan.delay)
    activation = 16 // num_data // model.num_microbatches * 16 * 64 * 4
    layers = model.layers // num_stages // model.virtual
    # In each tick each layer: 2 all-reduces forward, 2 computed again, 2 backward; an embedding; in some a head's, too.
    reduced = 6 * layers * ticks + ticks + heads + (ticks + 1 if name == "gpipe" else 0)
    small = 64 * 4 * (3 * layers * ticks + heads) if sequence else 0  # norms and bias, whole, of cut activations
    shared = (2 * 16 * 64 // 2 + 64) * 4
    at_rest = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params))
    want = {
        "pipeline": 2 * ticks * activation / (2 if sequence else 1) + 2 * (num_stages - 1) / num_stages * shared,
        "tensor": reduced * activation + small,  # 2 (T - 1) / T = 1
        "data": at_rest * {1: 0, 2: 1 / 2, 3: 2}[zero],  # zero 2: scattered; zero 3: half as much at rest, and gathered
    }
    found = inspect.report(compiled).wire_bytes_by_axes(opt.mesh)
    assert set(found) == {axis for axis, moved in want.items() if moved}
    for axis, moved in found.items():
        assert moved == pytest.approx(want[axis], rel=0.02), axis


def test_zero_inside_asks_once_per_step_or_once_per_microbatch():
    """Gathers and reduce-scatters over data: before the pipeline, once; inside the stages, in every tick."""
    counts = {}
    for unshard in (False, True):
        model = dataclasses.replace(ONE_F_ONE_B, unshard=unshard)
        opt = make(model, 3, pipeline=4)
        params = opt.place(model.params(np.float32))
        text = jax.jit(jaxshard.value_and_grad(model.loss, opt)).lower(params, model.batch()).compile().as_text()
        kinds = ("all-gather", "reduce-scatter")
        found = [c for c in inspect.collectives(text) if c.kind in kinds and "data" in c.axes(opt.mesh)]
        counts[unshard] = max(c.trips for c in found)
    assert counts[False] == 1
    assert counts[True] >= 2 * ONE_F_ONE_B.num_microbatches


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_shared_params_asked_for_inside_are_gathered_in_each_tick_and_not_kept(name):
    """The embedding and the head, of 40 x 64: never once, before the loops of ticks."""
    model = dataclasses.replace(MODELS[name], unshard=True, **(LARGER | {"vocabulary": 40}))
    opt = make(model, 3, pipeline=4)
    params, plan = opt.place(model.params(np.float32)), Plan(4, model.num_microbatches, model.virtual)
    for run, busy in (
        (jaxshard.value_and_grad(model.loss, opt), (plan.delay, plan.num_ticks - plan.delay)),
        (jaxshard.evaluate(model.loss, opt), (plan.num_ticks,)),
    ):
        text = jax.jit(run).lower(params, model.batch()).compile().as_text()
        gathers = [c for c in inspect.collectives(text) if c.kind == "all-gather" and c.bytes == 40 * 64 * 4]
        assert gathers
        assert {c.trips for c in gathers} == set(busy)


@pytest.mark.parametrize("zero", [0, 3])
def test_bytes_at_rest(zero):
    """Split leaves: 1 / (S T) of each, and 1 / (S T N) with ZeRO-3."""
    model = dataclasses.replace(ONE_F_ONE_B, width=16, hidden=32)
    opt = make(model, zero, pipeline=2, tensor=2)
    params = opt.place(model.params(np.float32))
    for name in ("qkv", "out", "up", "down"):
        leaf = params["blocks"][name]
        ways = 2 * 2 * (2 if zero == 3 else 1)
        assert {shard.data.nbytes for shard in leaf.addressable_shards} == {leaf.nbytes // ways}


# Keys.


def test_masks_differ_by_layer_and_microbatch_and_not_by_mesh_with_keys_of_examples():
    """A stage folds the key with its layer; per-example keys, a leaf of the batch, give the same masks on any mesh."""

    def loss(params, batch):
        def stage(blocks, x, info):
            def layer(x, at):
                number, w = at
                keys = jax.vmap(jax.random.fold_in, (0, None))(x["keys"], number)
                noise = jax.vmap(lambda key: jax.random.normal(key, (4,)))(keys)
                return x | {"h": x["h"] + w * noise}, None

            count = blocks.shape[0]
            return jax.lax.scan(layer, x, (info.chunk * count + jnp.arange(count), blocks))[0]

        def first(shared, microbatch, info):
            return {"h": microbatch["x"] * shared, "keys": microbatch["keys"]}

        def last(shared, x, microbatch, info):
            return jnp.mean(x["h"] ** 2)

        how = {"schedule": "gpipe", "num_microbatches": 2}
        return jaxshard.pipeline(stage, first, last, params["w"], params["s"], batch, **how)

    params = {"w": np.ones((4, 4), "f"), "s": np.float32(1)}
    batch = {"x": np.ones((8, 4), "f"), "keys": jax.random.split(jax.random.key(0), 8)}
    found = []
    for sizes in ({"pipeline": 4, "devices": jax.devices()}, {"pipeline": 2, "devices": jax.devices()[:4]}, {}):
        opt = jaxshard.zero2(optax.sgd(0.1), jaxshard.make_mesh(**sizes), specs=[("w", P("pipeline"))])
        found.append(jaxshard.evaluate(loss, opt)(params, batch) if sizes else loss(params, batch))
    np.testing.assert_allclose(found, found[-1], rtol=1e-6)


def test_a_key_that_the_stage_closes_over():
    """Keys among the arguments are folded with the data shard; the stage folds layer and microbatch."""
    seen = []

    def loss(params, batch, key):
        def stage(blocks, x, info):
            key_of = jax.random.fold_in(jax.random.fold_in(key, info.chunk), info.microbatch)
            return x * jax.random.bernoulli(key_of, 0.5, x.shape) * jnp.sum(blocks)

        how = {"schedule": "1f1b", "num_microbatches": 2}
        return jaxshard.pipeline(
            stage, lambda s, m, i: m * s, lambda s, x, m, i: jnp.mean(x), params["w"], params["s"], batch, **how
        )

    params = {"w": np.ones((4, 1), "f"), "s": np.float32(1)}
    opt = jaxshard.ddp(optax.sgd(0.1), jaxshard.make_mesh(pipeline=4), specs=[("w", P("pipeline"))])
    run = jaxshard.value_and_grad(loss, opt)
    for seed in range(3):
        value, grads = run(opt.place(params), np.ones((8, 64), "f"), jax.random.key(seed))
        seen.append(float(value))
        assert float(grads["s"]) == pytest.approx(float(value))
    assert len(set(seen)) == 3


# What others get wrong.


@pytest.mark.parametrize("name", ["gpipe", "interleaved"])
def test_work_of_the_bubbles_is_discarded(name, monkeypatch):
    """Stages with nothing to do compute something all the same; planted: it is taken for real.

    (Under plain 1f1b no gradient comes in then, since nothing goes around, so that it would add zeros.)
    """
    right = Plan._work

    def found():
        return gradients(MODELS[name], make(MODELS[name], pipeline=4))

    with jax.enable_x64(True):
        assert_close(found(), truth(MODELS[name]), 1e-12)
        monkeypatch.setattr(Plan, "_work", lambda *args, **how: right(*args, **how)._replace(busy=jnp.bool(True)))
        with pytest.raises(AssertionError):
            assert_close(found(), truth(MODELS[name]), 0.1)


def test_groups_do_not_mix_ranks():
    """Each collective goes along one axis; planted: a mean over all devices of a group that has the tensor axis too."""
    model = dataclasses.replace(ONE_F_ONE_B, num_microbatches=2)

    def axes_of(loss, zero):
        opt = make(model, zero, pipeline=2, tensor=2)
        lowered = jax.jit(jaxshard.value_and_grad(loss, opt)).lower(opt.place(model.params(np.float32)), model.batch())
        return {c.axes(opt.mesh) for c in inspect.collectives(lowered.compile().as_text())}

    for zero in (1, 3):
        assert axes_of(model.loss, zero) == {("pipeline",), ("data",), ("tensor",)}

    def mixed(params, batch):
        kernel = params["blocks"]["up"]
        return model.loss(params, batch) + jax.lax.psum(jnp.sum(kernel), ("pipeline", "tensor"))

    assert ("pipeline", "tensor") in axes_of(mixed, 1)


def test_gradients_that_would_be_lost_are_refused():
    """What a stage closes over has no gradient in a schedule of its own; silence would train on wrong ones."""

    def loss(params, batch):
        def stage(blocks, x, info):
            return jnp.tanh(x * jnp.sum(blocks) * params["s"])

        return jaxshard.pipeline(
            stage, lambda s, m, i: m, lambda s, x, m, i: jnp.mean(x), params["w"], (), batch, num_microbatches=2
        )

    params = {"w": np.ones((4, 1), "f"), "s": np.float32(1)}
    opt = jaxshard.ddp(optax.sgd(0.1), jaxshard.make_mesh(pipeline=4), specs=[("w", P("pipeline"))])
    with pytest.raises(TypeError, match="a value other than its params that needs a gradient"):
        jaxshard.value_and_grad(loss, opt)(params, np.ones((8, 4), "f"))
    assert np.isfinite(jaxshard.evaluate(loss, opt)(params, np.ones((8, 4), "f")))


def test_bubbles_do_not_make_nans_of_a_norm_without_epsilon():
    """The stages' norms divide by the root of mean squares alone; of zeros that would be NaN."""
    for model in (GPIPE, ONE_F_ONE_B, INTERLEAVED):
        found = gradients(dataclasses.replace(model, layers=8), make(model, pipeline=4))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


# Bad input.


def simple(**changes):
    """Runs a small pipeline of 4 stages with some things wrong."""
    given = {
        "stage": lambda blocks, x, info: x + jnp.sum(blocks),
        "first": lambda shared, m, info: m * shared,
        "last": lambda shared, x, m, info: jnp.mean(x),
        "specs": [("w", P("pipeline"))],
        "rows": 8,
        "w": np.ones((4, 2), "f"),
        "num_microbatches": 2,
    } | changes
    functions = [given.pop(name) for name in ("stage", "first", "last")]
    specs, rows, w = given.pop("specs"), given.pop("rows"), given.pop("w")
    opt = jaxshard.ddp(optax.sgd(0.1), jaxshard.make_mesh(pipeline=4), specs=specs)

    def loss(p, batch):
        return jaxshard.pipeline(*functions, p["w"], p["s"], batch, **given)

    return jaxshard.value_and_grad(loss, opt)({"w": w, "s": np.float32(1)}, np.ones((rows, 4), "f"))


BAD = {
    "schedule": (
        {"schedule": "2f2b"},
        ValueError,
        "unknown schedule '2f2b'; the schedules are gpipe, 1f1b, interleaved",
    ),
    "virtual alone": ({"virtual": 2}, ValueError, "with virtual=2; 'interleaved' needs at least 2 virtual stages"),
    "not virtual": (
        {"schedule": "interleaved"},
        ValueError,
        "with virtual=1; 'interleaved' needs",
    ),
    "count": ({"num_microbatches": 0}, ValueError, "num_microbatches 0 must be an integer"),
    "remat": ({"remat": "layer"}, ValueError, "remat 'layer' must be"),
    "rows": ({"num_microbatches": 3}, ValueError, r"shape \(4, 4\) on each device.*divisible by num_microbatches 3"),
    "groups": (
        {"schedule": "interleaved", "virtual": 2, "w": np.ones((2, 4), "f"), "specs": [("w", P(None, "pipeline"))]},
        ValueError,
        "num_microbatches 2 must be divisible by the number of stages 4.*give 4",
    ),
    "rounds": (
        {"schedule": "interleaved", "virtual": 2, "num_microbatches": 4},
        ValueError,
        r"shape \(1, 2\) on each device; it must be \(virtual 2, layers / \(virtual 2 x stages 4\)",
    ),
    "layers": ({"w": np.ones((6, 2), "f")}, ValueError, "dim 0 of 6 is not divisible by 4"),
    "whole blocks": ({"specs": None}, TypeError, r"blocks is replicated on every stage.*P\('pipeline'\)"),
    "cut shared": ({"specs": [(".", P("pipeline"))], "s": 1}, TypeError, ""),
    "shape": (
        {"stage": lambda b, x, i: x[..., :2] + jnp.sum(b)},
        ValueError,
        r"stage_fn turns float32\[2, 4\] into float32\[2, 2\]; the activation must keep",
    ),
    "dtype": ({"stage": lambda b, x, i: (x + jnp.sum(b)).astype(jnp.bfloat16)}, ValueError, r"into bfloat16\[2, 4\]"),
    "structure": ({"stage": lambda b, x, i: (x + jnp.sum(b), x)}, ValueError, "must keep the structure"),
    "loss": ({"last": lambda s, x, m, i: x}, TypeError, "last_fn must return a floating scalar"),
    "integers": ({"w": np.ones((4, 2), "i4")}, TypeError, "dtype int32"),
}
del BAD["cut shared"]


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    changes, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        simple(**changes)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("last", "got"), [(lambda s, x, m, i: x.mean(-1), r"float32\[2\]"), (lambda s, x, m, i: [x.mean(), 0], "a list")]
)
def test_a_loss_of_each_row_is_refused_by_every_schedule(schedule, last, got):
    with pytest.raises(TypeError, match=f"last_fn must return .*floating scalar,.* got {got}"):
        simple(schedule=schedule, last=last)


def test_a_type_that_a_layer_changes_is_not_called_a_cast_that_is_missing():
    """JAX's own message about dtypes is left as it is."""
    with pytest.raises(TypeError, match=r"^scan body function carry (.|\n)*bfloat16"):
        simple(
            first=lambda s, m, i: m.astype(jnp.bfloat16),
            stage=lambda b, x, i: jax.lax.scan(lambda x, w: (x + jnp.sum(w), None), x, b)[0],
        )


def test_shared_params_that_are_cut():
    opt = jaxshard.ddp(optax.sgd(0.1), jaxshard.make_mesh(pipeline=4), specs=[(".", P("pipeline"))])

    def loss(p, batch):
        return jaxshard.pipeline(
            lambda b, x, i: x + jnp.sum(b),
            lambda s, m, i: m,
            lambda s, x, m, i: jnp.mean(x),
            p["w"],
            p["s"],
            batch,
            num_microbatches=2,
        )

    with pytest.raises(TypeError, match="shared is sharded over 'pipeline'; it must be replicated on every stage"):
        jaxshard.value_and_grad(loss, opt)({"w": np.ones((4, 2), "f"), "s": np.ones(4, "f")}, np.ones((8, 4), "f"))


def test_unchecked_types_are_refused():
    def body(w, x):
        return jaxshard.pipeline(
            lambda b, x, i: x + jnp.sum(b),
            lambda s, m, i: m,
            lambda s, x, m, i: jnp.mean(x),
            w,
            (),
            x,
            num_microbatches=2,
        )

    mesh = jaxshard.make_mesh(pipeline=4)
    run = jax.shard_map(body, mesh=mesh, in_specs=(P("pipeline"), P("data")), out_specs=P(), check_vma=False)
    with pytest.raises(TypeError, match="check_vma=True"):
        jax.jit(run)(np.ones((4, 2), "f"), np.ones((8, 4), "f"))


def test_a_loss_that_differs_over_tensor():
    def loss(p, batch):
        return jaxshard.pipeline(
            lambda b, x, i: x * jnp.mean(b),
            lambda s, m, i: m,
            lambda s, x, m, i: jnp.mean(x),
            p,
            (),
            batch,
            num_microbatches=2,
        )

    opt = jaxshard.ddp(optax.sgd(0.1), jaxshard.make_mesh(pipeline=2, tensor=2), specs=P("pipeline", "tensor"))
    with pytest.raises(TypeError, match=re.escape("the loss of last_fn differs over ['tensor']; sum or average it")):
        jaxshard.value_and_grad(loss, opt)(np.ones((4, 4), "f"), np.ones((8, 4), "f"))
