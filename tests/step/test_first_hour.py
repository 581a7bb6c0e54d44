"""What a newcomer does in the first hour: mistakes that have a name, defaults, and results shown in a notebook."""

import html.parser
import itertools
import os
import re
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard
from jaxshard.mesh import abstract_mesh

TX = optax.adam(1e-3)
ROWS = np.ones((16, 64), "f")


def loss(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def params():
    return {"w": np.ones((64, 128), "f"), "b": np.ones(3, "f")}


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3", "fsdp", "hybrid"])
def test_without_a_mesh_an_optimizer_takes_all_devices(name):
    strategy = getattr(jaxshard, name)
    assert strategy(TX) == strategy(TX, jaxshard.make_mesh())
    assert strategy(TX, min_shard_size=8).config.min_shard_size == 8


def test_hsdp_on_one_replica_warns():
    with pytest.warns(UserWarning, match=r"hsdp: the mesh has one replica .*make_mesh\(replica=2\), or use zero3"):
        jaxshard.hsdp(TX)
    jaxshard.hsdp(TX, jaxshard.make_mesh(replica=2))
    named = jax.make_mesh((2, 4), ("dp", "fsdp"))
    jaxshard.hsdp(TX, named, data_axes="fsdp", replica_axes="dp")


def swapped(opt):
    return {
        "train_step": lambda: jaxshard.train_step(opt, loss),
        "value_and_grad": lambda: jaxshard.value_and_grad(opt, loss),
        "evaluate": lambda: jaxshard.evaluate(opt, loss),
        "predict": lambda: jaxshard.predict(opt, loss),
        "check": lambda: jaxshard.check(opt, loss, params(), ROWS),
        "shard_batch": lambda: jaxshard.shard_batch(opt, ROWS),
        "zero2": lambda: jaxshard.zero2(opt.mesh, TX),
    }


@pytest.mark.parametrize(
    "name", ["train_step", "value_and_grad", "evaluate", "predict", "check", "shard_batch", "zero2"]
)
def test_swapped_arguments_are_named(name):
    opt = jaxshard.zero2(TX)
    with pytest.raises(TypeError, match=rf"{name}: the arguments are swapped; write {name}\("):
        swapped(opt)[name]()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda opt: jaxshard.make_mesh(replicas=2), "make_mesh: unknown argument 'replicas'; did you mean 'replica'?"),
        (lambda opt: abstract_mesh(8, tensors=2), "abstract_mesh: unknown argument 'tensors'; did you mean 'tensor'?"),
        (lambda opt: jaxshard.train_step(loss, opt, microbatch=2), "'microbatch'; did you mean 'microbatches'?"),
        (lambda opt: jaxshard.value_and_grad(loss, opt, aux=True), "'aux'; did you mean 'has_aux'?"),
        (lambda opt: jaxshard.evaluate(loss, opt, weight=True), "'weight'; did you mean 'weighted'?"),
        (
            lambda opt: jaxshard.train_step(loss, opt, precision="bf16"),
            "unknown argument 'precision'. It takes loss_fn, opt",
        ),
    ],
)
def test_mistyped_arguments_are_named(call, said):
    with pytest.raises(TypeError) as error:
        call(jaxshard.zero2(TX))
    assert said in str(error.value)


NOT_THERE = {
    "step": "train_step(loss_fn, opt)",
    "zero_grad": "train_step(loss_fn, opt)",
    "state_dict": "Checkpointer",
    "param_groups": "optax.partition",
    "anything": "no attribute 'anything'",
}


@pytest.mark.parametrize("name", NOT_THERE)
def test_what_torchs_optimizers_have_is_told_where_to_find(name):
    opt = jaxshard.zero2(TX)
    assert not hasattr(opt, name)
    with pytest.raises(AttributeError) as error:
        getattr(opt, name)
    assert NOT_THERE[name] in str(error.value)


@pytest.mark.parametrize(
    ("option", "said"),
    [("cpu_offload", 'state_memory="host"'), ("gradient_accumulation_steps", "microbatches="), ("stage", "zero3")],
)
def test_options_of_other_libraries_are_told_what_to_give(option, said):
    with pytest.raises(TypeError, match=rf"unknown option '{option}'; .*{re.escape(said)}"):
        jaxshard.zero2(TX, **{option: 1})


@pytest.mark.parametrize("make", [jaxshard.train_step, jaxshard.value_and_grad, jaxshard.predict])
def test_further_arguments_have_no_names(make):
    opt = jaxshard.zero2(TX)
    with pytest.raises(TypeError, match=r"unknown argument 'key'; further arguments have no names: .*batch, \*args\)"):
        make(loss, opt)(params(), ROWS, ROWS, key=1)


def test_an_integer_in_the_place_of_a_key_and_a_loss_called_otherwise_than_it_is_written():
    def noisy(p, batch, key):
        return loss(p, batch) + jax.random.normal(key)

    grads = jaxshard.value_and_grad(noisy, jaxshard.zero2(TX))
    with pytest.raises(TypeError) as error:
        grads(params(), ROWS, 0)
    assert any("jax.random.key(0), not its seed" in note for note in error.value.__notes__)
    with pytest.raises(KeyError) as error:
        jaxshard.value_and_grad(lambda batch, p: batch["x"] @ p["w"], jaxshard.zero2(TX))(params(), ROWS)
    assert any("called as loss_fn(params, batch, *args)" in note for note in error.value.__notes__)


def test_a_layout_tells_of_params_whose_updates_are_rounded_away():
    short = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), params())
    assert "params are bfloat16, and updates far" in repr(jaxshard.zero2(TX).layout(short))
    for options in ({"master_dtype": "float32"}, {"stochastic_rounding": True}):
        assert "rounding:" not in repr(jaxshard.zero2(TX, **options).layout(short))
    assert "rounding:" not in repr(jaxshard.zero2(TX).layout(params()))


def test_shard_batch_under_jit_says_where_it_belongs():
    opt = jaxshard.zero2(TX)
    with pytest.raises(TypeError, match=r"shard_batch: the batch is traced.*Call it before, on the rows"):
        jax.jit(lambda batch: jaxshard.shard_batch(batch, opt))(ROWS)


CORRUPT = """
import jax; jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp, numpy as np, optax, jaxshard

def block(x, w):
    return x + jnp.tanh(x @ jaxshard.unshard(w)), None

def loss(params, batch):
    x, _ = jax.lax.scan(jax.checkpoint(block), batch["x"], params["blocks"])
    return jnp.mean((x @ params["out"] - batch["y"]) ** 2)

rng = np.random.default_rng(0)
params = {"blocks": rng.normal(size=(4, 256, 256)).astype("f") / 64, "out": rng.normal(size=(256, 64)).astype("f") / 16}
batch = {"x": rng.normal(size=(256, 256)).astype("f"), "y": rng.normal(size=(256, 64)).astype("f")}
opt = jaxshard.zero3(optax.adamw(3e-4))
step = jaxshard.train_step(loss, opt, donate=False)
p, state = opt.place(params), opt.init(params)
for _ in range(3):
    p, state, metrics = step(p, state, jaxshard.shard_batch(batch, opt))
print(float(metrics["loss"]) < 3)
"""


def test_a_step_that_donates_nothing_leaves_memory_intact():
    """XLA for CPU of jax 0.10 wrote where it should not, and the process ended by a signal."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # as users compile
    done = subprocess.run([sys.executable, "-c", CORRUPT], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr[-2000:]


class Cells(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.rows, self.open = [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] in ("td", "th"):
            self.rows[-1].append(data)


def test_results_show_their_tables():
    opt = jaxshard.zero2(TX)
    layout, step = opt.layout(params()), jaxshard.train_step(loss, opt, microbatches=2)
    assert repr(layout) == str(layout)
    rows = Cells(layout._repr_html_()).rows
    assert rows[0][:2] == ["leaf", "shape"]  # the first heading is empty
    assert ["params", "w"] in [row[:2] for row in rows]
    assert "bytes per device" in layout._repr_html_()
    facts = dict(row for row in Cells(step._repr_html_()).rows if len(row) == 2)
    assert facts | {"programs": "0"} == facts
    assert (facts["microbatches"], facts["donate"]) == ("2", "False")
    assert "zero2(" in repr(step)
    step(opt.place(params()), opt.init(params()), ROWS)
    assert "programs      1" in repr(step)


def test_a_report_shows_its_table():
    opt = jaxshard.zero2(TX)
    report = jaxshard.check(loss, opt, params(), ROWS)
    assert repr(report) == str(report)
    assert len(Cells(report._repr_html_()).rows) == 1 + len(report.differences)
    assert "The loss is a mean over rows" in report._repr_html_()


@pytest.mark.parametrize("order", [p for p in itertools.permutations("psb") if p != ("p", "s", "b")], ids="".join)
def test_swapped_arguments_of_a_step_are_named(order):
    opt = jaxshard.zero2(TX)
    given = {"p": opt.place(params()), "s": opt.init(params()), "b": ROWS}
    with pytest.raises(TypeError, match=r"train_step: the arguments are swapped.*write step\(params, state, batch\)"):
        jaxshard.train_step(loss, opt)(*(given[name] for name in order))


def test_by_default_a_step_donates_but_not_on_cpu():
    abstract = jaxshard.zero2(TX, abstract_mesh(8, platform="tpu", device_kind="v5e"))
    opt = jaxshard.zero2(TX)
    assert jaxshard.train_step(loss, abstract).donate
    step = jaxshard.train_step(loss, opt)
    assert not step.donate
    assert jaxshard.train_step(loss, opt, donate=True).donate
    p, s = opt.place(params()), opt.init(params())
    first, again = (step(p, s, ROWS)[0] for _ in range(2))
    assert not any(x.is_deleted() for x in jax.tree.leaves((p, s)))
    chex.assert_trees_all_equal(first, again)


def test_errors_while_the_loss_is_traced_name_the_users_function_and_arguments():
    def decides(p, batch):
        return loss(p, batch) if loss(p, batch) > 0 else 0.0

    opt = jaxshard.zero2(TX)
    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        jaxshard.train_step(decides, opt)(opt.place(params()), opt.init(params()), ROWS)
    assert f"the function decides at {__file__}" in str(error.value)
    assert "params['w']" in str(error.value)
    assert "leaves" not in str(error.value)


def test_an_optimizers_attributes_cannot_be_set():
    opt = jaxshard.zero2(TX)
    with pytest.raises(AttributeError, match=r"learning_rate cannot be set.*inject_hyperparams"):
        opt.learning_rate = 1e-4


def test_an_optimizer_that_was_not_called_is_named():
    with pytest.raises(TypeError, match=r"got function: .*call it: adamw\(...\)"):
        jaxshard.zero2(optax.adamw)
