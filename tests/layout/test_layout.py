"""Where each leaf lives: pure, from shapes alone, without devices."""

import dataclasses
import itertools
import math
import warnings
from typing import NamedTuple

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jaxshard
from jaxshard.base.types import local_shape
from jaxshard.layout.cutting import cut_leaf
from jaxshard.layout.layout import check_specs_used, layout_params, layout_state, warn_if_awkward
from jaxshard.layout.options import Config
from jaxshard.layout.undivided import undivided


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


WHOLE = P()


def cut(shape, sizes, spec=WHOLE, axes=None, min_shard_size=0, dtype=jnp.float32, reduce_dtype=None, platform="tpu"):
    sizes = {"data": sizes} if isinstance(sizes, int) else sizes
    axes = tuple(sizes) if axes is None else axes
    config = Config("zero2", data_axes=axes, min_shard_size=min_shard_size, reduce_dtype=reduce_dtype)
    return cut_leaf(("leaf",), shape, dtype, spec, sizes, config, platform)


def lay(params, sizes, strategy="zero2", state=None, strict=True, **options):
    axes, platform = options.pop("data_axes", ("data",)), options.pop("platform", "tpu")
    config = Config(strategy, data_axes=axes, **{"min_shard_size": 0} | options)
    found = layout_params(config, params, sizes, platform)
    if strict:
        check_specs_used(found)
    return found if state is None else layout_state(found, state)


def specs_in(leaves):
    return {leaf.path: leaf.cut for leaf in leaves}


# The rule of DESIGN section 4, dim by dim.


@pytest.mark.parametrize(
    ("shape", "num_data", "spec", "why"),
    [
        ((1024,), 8, P("data"), "the last dim, shards of 128"),
        ((64, 1024), 8, P(None, "data"), "the last dim, shards of 128"),
        ((64, 512), 8, P("data"), "shards of 64 are no multiple of 128, 8 rows are one of 8"),
        ((64, 1032), 8, P("data"), "shards of 129; 8 rows"),
        ((40, 512), 8, P("data"), "any: the second last before the last"),
        ((17, 256), 8, P(None, "data"), "only the last divides"),
        ((256, 17), 8, P("data"), "only the second last divides"),
        ((32000, 1024), 8, P(None, "data"), "measured: dim 0 was an all-reduce padded to 32256 rows"),
        ((12, 768, 2304), 2, P(None, None, "data"), "2304/2 = 9 x 128"),
        ((12, 768, 2304), 4, P(None, "data"), "2304/4 = 576 is no multiple of 128, 768/4 = 192 is one of 8"),
        ((16, 768, 2304), 8, P(None, "data"), "layers last of all"),
        ((8, 17, 19), 8, P("data"), "layers, since nothing else divides"),
        ((8, 24), 8, P("data"), "two dims: the first is no stack of layers"),
        ((8, 16, 17), 8, P(None, "data"), "the second last, though shards of 2"),
        ((8, 24, 17, 19), 8, P(None, "data"), "a middle dim before the layers"),
        ((3, 3, 8, 1024), 8, P(None, None, None, "data"), "a convolution's kernel"),
        ((1, 1, 1024), 8, P(None, None, "data"), "dims of 1"),
        ((1024, 1), 8, P("data"), "dims of 1"),
    ],
)
def test_the_rule(shape, num_data, spec, why):
    leaf = cut(shape, num_data)
    assert leaf.cut == spec, why
    assert leaf.ways == num_data
    assert not leaf.awkward


@pytest.mark.parametrize(
    ("shape", "dtype", "reduce_dtype", "spec"),
    [
        ((768, 2304), jnp.bfloat16, None, P("data")),
        ((768, 2304), jnp.float16, None, P("data")),
        ((768, 2304), jnp.float32, None, P(None, "data")),
        ((768, 4608), jnp.bfloat16, None, P(None, "data")),
        ((768, 2304), jnp.bfloat16, jnp.float32, P(None, "data")),
        ((768, 2304), jnp.float32, jnp.bfloat16, P("data")),
        ((17, 2304), jnp.bfloat16, None, P(None, "data")),
    ],
)
def test_lanes_are_of_the_dtype_that_gradients_are_reduced_in(shape, dtype, reduce_dtype, spec):
    """2304/2 = 9 x 128: two bytes an element, the TPU compiler all-reduces such shards; 4608/2 is 9 x 256."""
    assert cut(shape, 2, dtype=dtype, reduce_dtype=reduce_dtype).cut == spec


def test_tables_are_cut_along_their_features_in_any_dtype():
    """Devices then exchange rows; where the whole gradient is scattered all the same, it is transposed."""
    assert cut((32000, 1024), 8, dtype=jnp.bfloat16).cut == P(None, "data")


@pytest.mark.parametrize(
    ("strategy", "shape", "spec"),
    [
        ("zero2", (200_000, 64), P("data")),
        ("zero2", (200_000, 256), P(None, "data")),
        ("zero3", (200_000, 64), P(None, "data")),
        ("zero3", (200_000, 256), P(None, "data")),
    ],
)
def test_on_gpu_narrow_tables_that_are_gathered_are_cut_by_rows(strategy, shape, spec):
    """XLA transposes what it gathers along features: 16 tables of 64 features, 1313 MB beside 1152."""
    assert lay({"t": struct(*shape)}, {"data": 8}, strategy, platform="gpu").params[0].cut == spec


@pytest.mark.parametrize("shape", [(17, 257), (17,), (13, 17), (7,), (1,), (1, 1), (31, 33, 35)])
@pytest.mark.parametrize("num_data", [2, 4, 8])
def test_what_no_data_size_divides_stays_whole(shape, num_data):
    leaf = cut(shape, num_data)
    assert (leaf.cut, leaf.ways, leaf.dims) == (P(), 1, ())
    assert str(num_data) in leaf.reason
    assert str(shape) in leaf.reason


def test_a_hostile_shape_whose_last_dim_has_a_factor():
    """(64, 297): 297 = 27 x 11."""
    assert cut((64, 297), 3).cut == P(None, "data")
    assert cut((64, 297), 8).cut == P("data")
    assert cut((64, 297), 5).cut == P()


@pytest.mark.parametrize("shape", [(), (0,), (0, 8), (8, 0)])
def test_scalars_and_empty_leaves_stay_whole_and_are_not_awkward(shape):
    leaf = cut(shape, 8, min_shard_size=2**11)
    assert leaf.cut == P()
    assert not leaf.awkward
    assert cut(shape, 8, min_shard_size=0).cut == P()


def test_min_shard_size_is_a_number_of_elements():
    assert cut((8, 256), 8, min_shard_size=2048).ways == 8
    assert cut((8, 255), 8, min_shard_size=2048).ways == 1
    assert "2040 elements" in cut((8, 255), 8, min_shard_size=2048).reason
    assert "2048" in cut((8, 255), 8, min_shard_size=2048).reason


def test_one_data_device_cuts_nothing():
    assert cut((8, 1024), 1).cut == P()


def test_dims_that_specs_use_are_taken():
    sizes = {"data": 4, "tensor": 2}
    assert cut((64, 1024), sizes, P(None, "tensor"), ("data",)).cut == P("data", "tensor")
    assert cut((64, 1024), sizes, P("tensor"), ("data",)).cut == P("tensor", "data")
    assert cut((17, 1024), sizes, P(None, "tensor"), ("data",)).cut == P(None, "tensor")
    assert cut((64, 1024), sizes, P("tensor", "tensor_too"), ("data",)).ways == 1


def test_dims_are_counted_from_the_end():
    """So that they stay right for one layer of a stack."""
    assert cut((16, 768, 2304), 8).dims == ((-2, ("data",)),)


# Several data axes.


def test_each_data_axis_may_cut_a_dim_of_its_own():
    sizes = {"slice": 4, "data": 128}
    leaf = cut((12, 768, 2304), sizes)
    assert (leaf.cut, leaf.ways) == (P(None, "slice", "data"), 512)  # the layers' dim is not needed
    with_tensor = sizes | {"tensor": 2}
    assert cut((12, 768, 2304), with_tensor, P(None, None, "tensor"), tuple(sizes)).cut == P("slice", "data", "tensor")
    assert cut((12, 768, 17), sizes).cut == P("slice", "data")
    assert local_shape((12, 768, 17), P("slice", "data"), sizes) == (3, 6, 17)
    assert cut((2048, 17), sizes).cut == P(("slice", "data"))
    assert cut((128, 12), sizes).cut == P("data", "slice")
    assert cut((12, 17), sizes).cut == P("slice")
    assert cut((12, 17), sizes).ways == 4
    assert cut((12, 170), sizes).awkward
    assert "only 4 of 512 shards" in cut((12, 17), sizes).reason


GPT2 = {"dim": 768, "layers": 12, "context": 1024}


def gpt2(vocabulary):
    """All parameters of GPT-2 124M, layers stacked, embedding tied."""
    dim, layers = GPT2["dim"], GPT2["layers"]
    return {
        "wte": struct(vocabulary, dim),
        "wpe": struct(GPT2["context"], dim),
        "ln_f": {"scale": struct(dim), "bias": struct(dim)},
        "blocks": {
            "ln_1": {"scale": struct(layers, dim), "bias": struct(layers, dim)},
            "attn": {"kernel": struct(layers, dim, 3 * dim), "bias": struct(layers, 3 * dim)},
            "proj": {"kernel": struct(layers, dim, dim), "bias": struct(layers, dim)},
            "ln_2": {"scale": struct(layers, dim), "bias": struct(layers, dim)},
            "up": {"kernel": struct(layers, dim, 4 * dim), "bias": struct(layers, 4 * dim)},
            "down": {"kernel": struct(layers, 4 * dim, dim), "bias": struct(layers, dim)},
        },
    }


def test_the_shapes_are_those_of_gpt2():
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(gpt2(50257))) == 124_439_808


@pytest.mark.parametrize(
    ("factors", "options", "allowed"),
    [
        ((4, 128), {"min_shard_size": 2**11}, 1.01),
        ((4, 128), {}, 1.0001),
        ((8, 64), {}, 1.01),
        ((16, 32), {}, 1.011),  # (12, 768) is 32 ways at best: 768 has eight factors of 2, and 12 two
    ],
)
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_gpt2_over_512_devices_is_cut_within_one_per_cent(factors, options, allowed, strategy):
    params, sizes = gpt2(50304), dict(zip(("slice", "data"), factors, strict=True))
    state = jax.eval_shape(optax.adamw(1e-3).init, params)
    found = lay(params, sizes, strategy, state, data_axes=tuple(sizes), **options)
    whole = 4 * sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    num_bytes = found.bytes_per_device
    assert whole / 512 <= num_bytes["grads"] <= allowed * whole / 512
    assert num_bytes["state"] == 2 * num_bytes["grads"] + 4
    assert num_bytes["params"] == (num_bytes["grads"] if strategy == "zero3" else whole)
    if allowed <= 1.01:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warn_if_awkward(found)


def test_gpt2_with_its_odd_vocabulary_is_as_the_table_says_with_a_warning():
    """50257 = 29 x 1733, so over 4 x 128 devices only the 768 columns can be cut, 128 ways."""
    params, sizes = gpt2(50257), {"slice": 4, "data": 128}
    found = lay(params, sizes, "zero3", data_axes=("slice", "data"), min_shard_size=2**11)
    leaf = next(leaf for leaf in found.params if leaf.path == "wte")
    assert (leaf.cut, leaf.ways) == (P(None, "data"), 128)
    num_bytes = 50257 * 768 * 4 // 128
    assert leaf.bytes(leaf.cut, sizes) == num_bytes
    others = sum(x.bytes(x.cut, sizes) for x in found.params if x.path != "wte")
    assert found.bytes_per_device["params"] == num_bytes + others
    assert f"{num_bytes}" in next(line for line in str(found).splitlines() if " wte " in line)
    with pytest.warns(UserWarning, match="wte") as caught:
        warn_if_awkward(found)
    message = str(caught[0].message)
    lost = num_bytes - 50257 * 768 * 4 // 512
    for word in ("wte", "128 of 512", str(lost), "Pad", "data_axes"):
        assert word in message


def test_an_awkward_leaf_of_little_weight_is_not_warned_of():
    params = {"odd": struct(17, 19), "large": struct(1024, 8192)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_awkward(lay(params, {"data": 8}))
        warn_if_awkward(lay({"odd": struct(17, 19)}, {"data": 8}, "ddp"))
        warn_if_awkward(lay({"odd": struct(17, 19)}, {"data": 1}))
    with pytest.warns(UserWarning, match=r"odd: no free dim of \(17, 19\) is divisible by 8, \d+ more bytes"):
        warn_if_awkward(lay({"odd": struct(17, 19)}, {"data": 8}))


@pytest.mark.parametrize(("count", "fewer"), [(7, 6), (60, 48), (56, 48), (512, 384)])
def test_what_undivided_leaves_cost_is_told_with_a_number_of_devices_that_holds_less(count, fewer):
    """GPT-2, whose dims are multiples of 768: that number of devices holds what is told, and no smaller one less."""
    params = gpt2(50257)
    layout = lay(params, {"data": count}, "zero3")
    found = undivided(layout.params, layout.sizes, layout.config, layout.platform)
    whole = sum(math.prod(x.shape) for x in jax.tree.leaves(params)) * 4
    held = layout.bytes_per_device["params"]
    assert found.held_bytes == held
    assert held > 2 * whole / count
    assert held - found.lost_bytes == pytest.approx(whole / count, rel=0.05)
    told = lay(params, {"data": found.fewer[0]}, "zero3").bytes_per_device["params"]
    assert found.fewer == (fewer, told)
    near = [lay(params, {"data": n}, "zero3").bytes_per_device["params"] for n in range(max(1, count // 2), count)]
    assert min(near) == told
    assert layout.undivided == str(found)
    assert f"undivided: {found}" in str(layout)
    assert f"On {fewer} devices it would hold" in str(found)
    with pytest.warns(UserWarning, match=f"Take {fewer} devices, pad a dim"):
        warn_if_awkward(layout)


def test_leaves_that_all_devices_divide_are_not_told():
    assert lay(gpt2(50304), {"data": 8}).undivided == ""
    assert lay(gpt2(50257), {"data": 7}, "ddp").undivided == ""
    assert "undivided" not in str(lay(gpt2(50304), {"data": 8}))


def test_of_many_awkward_leaves_the_largest_are_named():
    params = {f"odd{i}": struct(17, 19 + 2 * i) for i in range(40)}
    with pytest.warns(UserWarning, match=r"40 leaves.*: odd39: .*; and 35 more") as caught:
        warn_if_awkward(lay(params, {"data": 8}))
    assert len(str(caught[0].message)) < 1000


# A property test, with the best cut found by brute force.

dims_st = st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 48, 64, 96, 257, 1024]), max_size=4)
sizes_st = st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3)


def _most_ways(shape, taken, data_sizes):
    """The largest product of axis sizes that any assignment of axes to free dims can cut by."""
    free = [dim for dim in range(len(shape)) if dim not in taken]
    best = 1
    for assignment in itertools.product([None, *free], repeat=len(data_sizes)):
        by_dim = {dim: math.prod(n for n, d in zip(data_sizes, assignment, strict=True) if d == dim) for dim in free}
        if all(shape[dim] % n == 0 for dim, n in by_dim.items()):
            best = max(best, math.prod(by_dim.values()))
    return best


@settings(max_examples=300, deadline=None)
@given(shape=dims_st, data_sizes=sizes_st, tensor=st.sampled_from([1, 2, 4]), spec_dim=st.integers(-1, 3))
def test_every_cut_is_valid_and_as_fine_as_can_be(shape, data_sizes, tensor, spec_dim):
    shape = tuple(shape)
    axes = tuple(f"data{i}" for i in range(len(data_sizes)))
    sizes = dict(zip(axes, data_sizes, strict=True)) | {"tensor": tensor}
    specced = 0 <= spec_dim < len(shape) and shape[spec_dim] % tensor == 0
    spec = P(*[None] * spec_dim, "tensor") if specced else P()
    leaf = cut(shape, sizes, spec, axes)
    assert leaf == cut(shape, sizes, spec, axes)

    entries = [entry if isinstance(entry, tuple) else (entry,) * (entry is not None) for entry in leaf.cut]
    used = [axis for entry in entries for axis in entry]
    assert len(set(used)) == len(used)
    assert not entries or entries[-1]  # no trailing None
    if specced:
        assert entries[spec_dim] == ("tensor",)
    for size, entry in zip(shape, entries, strict=False):
        assert size % math.prod(sizes[axis] for axis in entry) == 0
    local = local_shape(shape, leaf.cut, sizes)
    num_parts = math.prod(sizes[axis] for axis in used)
    assert math.prod(local) * num_parts == math.prod(shape)
    assert num_parts == leaf.ways * (tensor if specced else 1)
    if math.prod(shape):
        assert leaf.ways == _most_ways(shape, {spec_dim} if specced else (), data_sizes)
    assert leaf.awkward == (math.prod(shape) >= math.prod(data_sizes) and leaf.ways < math.prod(data_sizes))


# Specs: trees, prefixes and rules.

SIZES = {"data": 4, "tensor": 2, "pipeline": 2}


def tree():
    return {"attn": {"q": struct(16, 32), "o": struct(32, 16)}, "mlp": [struct(16, 64), struct(64, 16)]}


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        (None, [P(), P(), P(), P()]),
        (P("tensor"), [P("tensor")] * 4),
        (
            {"attn": P(None, "tensor"), "mlp": [P(), P("tensor")]},
            [P(None, "tensor"), P(None, "tensor"), P(), P("tensor")],
        ),
        ({"attn": {"q": P(None, "tensor"), "o": None}, "mlp": P()}, [P(), P(None, "tensor"), P(), P()]),
        ({"attn": P("tensor", None), "mlp": P(None, None)}, [P("tensor"), P("tensor"), P(), P()]),
        ([("attn/q$", P(None, "tensor")), ("attn", P("tensor"))], [P("tensor"), P(None, "tensor"), P(), P()]),
        ([("attn", P("tensor")), ("attn/q$", P(None, "tensor"))], [P("tensor"), P("tensor"), P(), P()]),
        ([(r"mlp/\d", P(("tensor", "pipeline")))], [P(), P(), P(("tensor", "pipeline")), P(("tensor", "pipeline"))]),
        ([], [P(), P(), P(), P()]),
        ([("^mlp/1$", P(("tensor",)))], [P(), P(), P(), P("tensor")]),
    ],
)
def test_specs_of_every_kind(specs, expected):
    """Leaves come as attn/o, attn/q, mlp/0, mlp/1."""
    found = lay(tree(), SIZES, specs=specs)
    assert [leaf.path for leaf in found.params] == ["attn/o", "attn/q", "mlp/0", "mlp/1"]
    assert [leaf.spec for leaf in found.params] == expected


def test_masked_leaves_on_either_side():
    masked = tree() | {"mlp": optax.MaskedNode()}
    specs = {"attn": {"q": P("tensor"), "o": P()}, "mlp": optax.MaskedNode()}
    for given_specs in (specs, [("q$", P("tensor")), ("mlp", P("tensor"))]):
        found = lay(masked, SIZES, specs=given_specs, strict=False)
        assert [leaf.spec for leaf in found.params] == [P(), P("tensor")]
    assert lay(masked, SIZES, specs={"attn": P(), "mlp": P("tensor")}, strict=False).params[0].spec == P()


def test_nnx_and_boxed_linen_paths_drop_the_trailing_value():
    class Model(nnx.Module):
        def __init__(self):
            self.first = nnx.Linear(16, 32, rngs=nnx.Rngs(0))

    params = nnx.state(nnx.eval_shape(Model), nnx.Param)
    found = lay(params, SIZES, specs=[("^first/kernel$", P(None, "tensor"))])
    assert {leaf.path: leaf.spec for leaf in found.params} == {"first/bias": P(), "first/kernel": P(None, "tensor")}
    assert lay(params, SIZES, specs={"first": {"kernel": P("tensor"), "bias": P()}}).params[1].spec == P("tensor")
    boxed = {"kernel": nn.Partitioned(struct(16, 32), names=("a", "b"))}
    assert lay(boxed, SIZES, specs=[("^kernel$", P("tensor"))]).params[0].spec == P("tensor")


def test_a_parameter_that_is_called_value_keeps_its_name():
    found = lay({"value": struct(16, 32)}, SIZES, specs=[("^value$", P("tensor"))])
    assert found.params[0].path == "value"


@pytest.mark.parametrize(
    ("specs", "error", "words"),
    [
        (P("tensr"), ValueError, ("attn/o", "'tensr'", "did you mean 'tensor'")),
        (P("tensor", "tensor"), ValueError, ("attn/o", "twice")),
        (P(None, None, None, "tensor"), ValueError, ("attn/o", "2 dims")),
        ([("attn/v", P())], ValueError, ("'attn/v'", "matches no parameter", "attn/q")),
        ({"attn": P()}, ValueError, ("mlp/0", "PartitionSpec")),
        ({"attn": P(), "mlp": P(), "head": P()}, ValueError, ("head", "not a parameter")),
        ({"attn": P(), "mlp": ["tensor", P()]}, TypeError, ("mlp/0", "str", "PartitionSpec")),
        ("tensor", TypeError, ("str", "PartitionSpec")),
    ],
)
def test_every_error_of_specs(specs, error, words):
    with pytest.raises(error) as caught:
        lay(tree(), SIZES, specs=specs)
    for word in words:
        assert word in str(caught.value)


def test_a_dim_that_does_not_divide():
    with pytest.raises(ValueError, match=r"w .*dim 1 of 33 is not divisible by 2 .*pad it to 34"):
        lay({"w": struct(16, 33)}, SIZES, specs={"w": P(None, "tensor")})


def test_only_whole_trees_must_match_every_rule():
    rules = [("attn/v", P("tensor")), ("q$", P("tensor"))]
    assert [leaf.spec for leaf in lay(tree(), SIZES, specs=rules, strict=False).params] == [P(), P("tensor"), P(), P()]


# State leaves follow their parameters.

STATE_PARAMS = {"w": struct(64, 1024), "b": struct(1024)}
STATE_SIZES = {"data": 4, "tensor": 2}
STATE_SPECS = {"w": P("tensor"), "b": P()}


def state_specs(inner):
    found = lay(STATE_PARAMS, STATE_SIZES, state=jax.eval_shape(inner.init, STATE_PARAMS), specs=STATE_SPECS)
    assert specs_in(found.params) == {"w": P("tensor", "data"), "b": P("data")}
    return {(leaf.path, leaf.shape): leaf.cut for leaf in found.state}


FOLLOWING = {
    "adam": lambda: optax.adam(1e-3),
    "masked": lambda: optax.masked(optax.adam(1e-3), {"w": True, "b": True}),
    "partition": lambda: optax.partition({"a": optax.adam(1e-3)}, "a"),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.trace(0.9), optax.ema(0.9)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-3), 4),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-3), 3),
    "lbfgs": lambda: optax.lbfgs(1e-3, linesearch=None),
}


@pytest.mark.parametrize("name", list(FOLLOWING))
def test_state_leaves_follow_their_parameter(name):
    specs = state_specs(FOLLOWING[name]())
    of_w = [spec for (_, shape), spec in specs.items() if shape == (64, 1024)]
    of_b = [spec for (_, shape), spec in specs.items() if shape == (1024,)]
    scalars = [spec for (_, shape), spec in specs.items() if shape == ()]
    assert of_w
    assert set(of_w) == {P("tensor", "data")}
    assert set(of_b) == {P("data")}
    assert set(scalars) <= {P()}


def test_wide_state_follows_its_narrow_parameter():
    """Float32 masters and moments of a bfloat16 parameter, and a stack, would by themselves be cut elsewhere."""
    narrow, wide = {"w": struct(768, 2304, dtype=jnp.bfloat16)}, {"w": struct(768, 2304)}
    state = (wide, jax.eval_shape(optax.adam(1e-3).init, wide), {"w": struct(3, 768, 2304)}, [struct(768, 2304)])
    found = lay(narrow, {"data": 2}, state=state)
    assert found.params[0].cut == P("data")
    assert {leaf.dtype for leaf in found.state if leaf.shape} == {jnp.dtype("float32")}
    cuts = [(leaf.shape, leaf.cut) for leaf in found.state if leaf.shape]
    follows = ((768, 2304), P("data"))
    assert cuts == [follows, follows, follows, ((3, 768, 2304), P(None, "data")), follows]
    assert lay(wide, {"data": 2}).params[0].cut == P(None, "data")


def test_with_masters_wide_params_are_cut_as_their_narrow_copies_are():
    """A state begun by the float32 params lay elsewhere than that of the bf16 ones: the step compiled twice."""
    narrow, wide = {"w": struct(768, 2304, dtype=jnp.bfloat16)}, {"w": struct(768, 2304)}
    cuts = [lay(params, {"data": 2}, master_dtype=jnp.float32).params[0].cut for params in (narrow, wide)]
    assert cuts == [P("data"), P("data")]


def test_partition_with_one_label_masked_out():
    inner = optax.partition({"a": optax.adam(1e-3), "b": optax.set_to_zero()}, {"w": "a", "b": "b"})
    specs = state_specs(inner)
    assert {shape for _, shape in specs} == {(), (64, 1024)}
    assert {spec for (_, shape), spec in specs.items() if shape} == {P("tensor", "data")}


def test_factored_moments_are_cut_by_their_own_shape():
    """Adafactor keeps rows and columns of `w`, at w's path, and dummies of one element."""
    specs = state_specs(optax.adafactor(1e-3, min_dim_size_to_factor=4))
    by_shape = {shape: spec for (path, shape), spec in specs.items() if path.endswith("w")}
    assert by_shape[(64,)] == P("data")
    assert by_shape[(1024,)] == P("data")
    assert by_shape[(1,)] == P()


def test_muon_follows_inside_its_partition():
    specs = state_specs(optax.contrib.muon(1e-3))
    moments = {shape: spec for (_, shape), spec in specs.items() if shape}
    assert moments == {(64, 1024): P("tensor", "data"), (1024,): P("data"), (3,): P()}  # and its polynomial


class Momentum(NamedTuple):
    count: object
    velocity: object


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Written:
    first: object
    nested: Momentum


@jax.tree_util.register_pytree_node_class
class Keyless:
    """A container whose children have no names."""

    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


OWN_STATES = {
    "NamedTuple": lambda p: Momentum(jnp.zeros(()), p),
    "dataclass": lambda p: Written(p, Momentum(jnp.zeros((), jnp.int32), p)),
    "keyless": lambda p: Keyless(p, (jnp.zeros(()), Keyless(p))),
    "list": lambda p: [jnp.zeros(()), *jax.tree.leaves(p)],
}


@pytest.mark.parametrize("name", OWN_STATES)
def test_states_that_users_write_themselves(name):
    def init(params):
        return OWN_STATES[name](jax.tree.map(jnp.zeros_like, params))

    inner = optax.GradientTransformation(init, lambda g, s, p=None: (g, s))
    wrapped = optax.MultiSteps(optax.inject_hyperparams(lambda rate: optax.chain(inner, optax.scale(rate)))(0.1), 2)
    for tx in (inner, wrapped):
        specs = state_specs(tx)
        assert {spec for (_, shape), spec in specs.items() if shape == (64, 1024)} == {P("tensor", "data")}
        assert {spec for (_, shape), spec in specs.items() if shape == (1024,)} == {P("data")}
        assert {spec for (_, shape), spec in specs.items() if shape == ()} == {P()}


def test_a_shape_alone_decides_nothing_where_parameters_disagree():
    params, specs = {"a": struct(64, 1024), "b": struct(64, 1024)}, {"a": P("tensor"), "b": P(None, "tensor")}
    inner = optax.GradientTransformation(lambda p: [jnp.zeros_like(p["a"])], lambda g, s, p=None: (g, s))
    (leaf,) = lay(params, STATE_SIZES, state=jax.eval_shape(inner.init, params), specs=specs).state
    assert leaf.spec == P()


def test_a_stack_of_params_follows_in_its_last_dims():
    specs = state_specs(optax.scale_by_lbfgs(memory_size=3))
    assert specs["diff_params_memory/w", (3, 64, 1024)] == P(None, "tensor", "data")
    assert specs["diff_params_memory/b", (3, 1024)] == P(None, "data")


def test_the_table_explains_each_state_leaf():
    inner = optax.chain(optax.scale_by_lbfgs(memory_size=3), optax.adafactor(1e-3, min_dim_size_to_factor=4))
    found = lay(STATE_PARAMS, STATE_SIZES, state=jax.eval_shape(inner.init, STATE_PARAMS), specs=STATE_SPECS)
    reasons = {leaf.path: leaf.reason for leaf in found.state}
    assert reasons["0/params/w"] == "like w: dim 1 by data"
    assert reasons["0/diff_params_memory/w"] == "a stack like w: dim 2 by data"
    assert reasons["0/weights_memory"] == "no free dim of (3,) is divisible by 4"
    assert reasons["1/0/v_row/w"] == "made from w, with a different shape: dim 0 by data"
    assert all(reasons.values())


def test_keys_in_the_state_stay_whole():
    specs = state_specs(optax.add_noise(0.1, 0.5, 0))
    assert set(specs.values()) == {P()}


def test_a_leaf_at_a_parameters_path_but_of_another_shape_does_not_follow():
    inner = optax.GradientTransformation(
        lambda p: {"w": jnp.zeros((1024, 64)), "b": jnp.zeros(3)}, lambda g, s, p=None: (g, s)
    )
    assert state_specs(inner) == {("w", (1024, 64)): P("data"), ("b", (3,)): P()}


class Nested(NamedTuple):
    w: object
    other: object


def test_the_longest_path_wins():
    """A parameter `w`, and one `other/w` of the same shape under another spec."""
    params = Nested(struct(64, 1024), {"w": struct(64, 1024)})
    specs = Nested(P("tensor"), {"w": P(None, "tensor")})
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    found = lay(params, STATE_SIZES, state=state, specs=specs)
    cuts = {leaf.path: leaf.spec for leaf in found.state if leaf.shape}
    assert cuts == {"0/mu/w": P("tensor"), "0/mu/other/w": P(None, "tensor"), "0/nu/w": P("tensor"),
                    "0/nu/other/w": P(None, "tensor")}  # fmt: skip


# Bytes and the table.


@pytest.mark.parametrize(
    ("strategy", "params", "grads", "state"),
    [
        ("ddp", 4096 * 4 + 17 * 2, 4096 * 4 + 17 * 2, 2 * (4096 * 4 + 17 * 2) + 4),
        ("zero1", 4096 * 4 + 17 * 2, 512 * 4 + 17 * 2, 2 * (512 * 4 + 17 * 2) + 4),
        ("zero2", 4096 * 4 + 17 * 2, 512 * 4 + 17 * 2, 2 * (512 * 4 + 17 * 2) + 4),
        ("zero3", 512 * 4 + 17 * 2, 512 * 4 + 17 * 2, 2 * (512 * 4 + 17 * 2) + 4),
    ],
)
def test_bytes_per_device(strategy, params, grads, state):
    """A float32 leaf of 4096 elements, cut 8 ways, a bf16 leaf of 17, whole, and Adam's count."""
    tree = {"w": struct(32, 128), "b": struct(17, dtype=jnp.bfloat16)}
    found = lay(tree, {"data": 8}, strategy, jax.eval_shape(optax.adam(1e-3).init, tree))
    assert found.bytes_per_device == {"params": params, "grads": grads, "state": state}


def test_specs_divide_bytes_too():
    found = lay({"w": struct(64, 1024)}, STATE_SIZES, "zero3", specs={"w": P("tensor")})
    assert found.bytes_per_device["params"] == 64 * 1024 * 4 // 8
    found = lay({"w": struct(64, 1024)}, STATE_SIZES, "zero2", specs={"w": P("tensor")})
    assert found.bytes_per_device["params"] == 64 * 1024 * 4 // 2


def test_the_table_lists_every_leaf_with_its_bytes_and_reason():
    tree = {"w": struct(32, 128), "odd": struct(17, 257), "small": struct(3)}
    found = lay(tree, {"data": 8}, "zero3", jax.eval_shape(optax.sgd(1.0, momentum=0.9).init, tree), min_shard_size=16)
    lines = str(found).splitlines()
    assert len(lines) == 1 + 3 + 3 + 2
    rows = {(row[0], row[1]): row for row in found.rows()}
    assert rows["params", "w"][2:6] == ("(32, 128)", "float32", str(P("data")), str(32 * 128 * 4 // 8))
    assert "dim 0 by data" in rows["params", "w"][6]
    assert rows["params", "odd"][5] == str(17 * 257 * 4)
    assert "divisible by 8" in rows["params", "odd"][6]
    assert "3 elements, under min_shard_size 16" in rows["params", "small"][6]
    total = (32 * 128 // 8 + 17 * 257 + 3) * 4
    assert lines[-2] == f"bytes per device: params {total}, grads {total}, state {total}"
    assert lines[-1].startswith("undivided: 1 leaf has no dims that 8 divides (the largest is odd)")


def test_the_table_says_what_the_strategy_keeps_whole():
    found = lay({"w": struct(32, 128)}, {"data": 8}, "zero2")
    assert "zero2 keeps params replicated" in str(found)


def test_numpy_and_abstract_leaves_lie_alike():
    sizes = {"data": 8}
    one = lay({"w": np.zeros((32, 128), np.float32)}, sizes)
    two = lay({"w": struct(32, 128)}, sizes)
    assert one.params == two.params


@pytest.mark.parametrize(
    ("shape", "devices", "says"),
    [
        ((768, 768), 512, "; two data_axes of 2 and 256 devices would shard dim 0 256 ways"),
        ((50257, 768), 512, "; two data_axes of 2 and 256 devices would shard dim 1 256 ways"),
        ((768, 768), 7, ""),
    ],
)
def test_where_one_axis_has_too_many_devices_the_reason_names_the_cure(shape, devices, says):
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
    opt = jaxshard.zero3(optax.sgd(0.1), jaxshard.mesh.abstract_mesh(devices))
    (found,) = opt.layout({"w": leaf}).params
    assert found.reason == f"no free dim of {shape} is divisible by {devices}{says}"
    if says:  # and it cures
        ways = next(int(word) for word in reversed(says.split()) if word.isdigit())
        mesh = jax.sharding.AbstractMesh((devices // ways, ways), ("few", "many"))
        (found,) = jaxshard.zero3(optax.sgd(0.1), mesh, data_axes=("few", "many")).layout({"w": leaf}).params
        assert found.ways >= ways
