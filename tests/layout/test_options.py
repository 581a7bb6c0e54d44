"""Options have one source of truth, and a wrong one is told with the nearest."""

import dataclasses
import typing

import jax.numpy as jnp
import optax
import pytest

import jaxshard
from jaxshard.layout.options import CommonOptions, Config, Options

MESH = jaxshard.mesh.abstract_mesh(8)
STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "hsdp", "tensor_parallel", "pipeline_parallel", "hybrid"]


def test_the_typed_options_are_the_fields_of_the_config():
    """Names and types; `strategy` and `zero` are parameters of their own, axes may be given as one string too."""
    fields = typing.get_type_hints(Config)
    assert Options.__annotations__.keys() == fields.keys() - {"strategy", "zero"}
    assert CommonOptions.__annotations__.keys() == Options.__annotations__.keys() - {"specs"}
    hints = typing.get_type_hints(Options)
    axes, own = {"data_axes", "replica_axes", "auto_axes"}, {"params_axes", "grads_axes", "state_axes"}
    assert all(hints[name] == fields[name] for name in hints.keys() - axes - own)
    assert all(hints[name] == fields[name] | str for name in axes)
    assert all(hints[name] | None == fields[name] | str for name in own)  # None: the strategy's own choice


def test_every_field_but_the_strategy_has_a_default():
    given = [field.name for field in dataclasses.fields(Config) if field.default is dataclasses.MISSING]
    assert given == ["strategy"]


@pytest.mark.parametrize("name", STRATEGIES)
def test_docstrings_name_every_option(name):
    """Written where editors find them; `specs` is a parameter of its own in some."""
    told = getattr(jaxshard, name).__doc__
    assert [option for option in Options.__annotations__ if option not in told] == []


@pytest.mark.parametrize(
    ("given", "nearest"), [("reduce_dtyp", "reduce_dtype"), ("min_shard", "min_shard_size"), ("spec", "specs")]
)
def test_an_unknown_option_names_the_nearest(given, nearest):
    with pytest.raises(TypeError, match=f"zero2: unknown option '{given}'; did you mean '{nearest}'?"):
        jaxshard.zero2(optax.sgd(0.1), MESH, **{given: None})


def test_an_option_like_no_other_names_all():
    with pytest.raises(TypeError, match=r"unknown option 'q'. The options are auto_axes, .*stochastic_rounding"):
        jaxshard.zero2(optax.sgd(0.1), MESH, q=1)
    with pytest.raises(TypeError, match="unknown option 'zero'"):
        jaxshard.zero2(optax.sgd(0.1), MESH, zero=3)


def test_what_is_given_arrives():
    opt = jaxshard.zero2(optax.sgd(0.1), MESH, data_axes="data", min_shard_size=7, reduce_dtype=jnp.float32)
    assert opt.config == Config("zero2", data_axes=("data",), min_shard_size=7, reduce_dtype=jnp.float32)
