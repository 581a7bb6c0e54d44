"""Converts the config.json of a Hugging Face folder to our [model] and back, for GPT-2 and Llama.

A field that would make `transformers` compute something different is an error. Fields that it does not read for these
two architectures are ignored.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxshard.apps.config.checks import check
from jaxshard.apps.config.config import FAST_TURNS, SLOW_TURNS, Config, ModelConfig
from jaxshard.system import small_files

Json = dict[str, Any]

_MOST_BYTES = 2**25  # an index of 100,000 tensors has 10 MB

LONGEST = 4096
"""The longest context of a model with rotary positions, unless the user gives one."""

_FIELDS: Mapping[str, Mapping[str, tuple[str, Any]]] = {  # our option -> their field and its default
    "gpt2": {
        "layers": ("n_layer", 12),
        "width": ("n_embd", 768),
        "heads": ("n_head", 12),
        "hidden": ("n_inner", None),
        "sequence_length": ("n_positions", 1024),
        "vocabulary": ("vocab_size", 50257),
        "norm_epsilon": ("layer_norm_epsilon", 1e-5),
        "tied": ("tie_word_embeddings", True),
    },
    "llama": {
        "layers": ("num_hidden_layers", 32),
        "width": ("hidden_size", 4096),
        "heads": ("num_attention_heads", 32),
        "kv_heads": ("num_key_value_heads", None),
        "hidden": ("intermediate_size", 11008),
        "sequence_length": ("max_position_embeddings", 2048),
        "vocabulary": ("vocab_size", 32000),
        "norm_epsilon": ("rms_norm_eps", 1e-6),
        "bias": ("attention_bias", False),
        "tied": ("tie_word_embeddings", False),
    },
}
_FIXED: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"positions": "learned", "mlp": "gelu", "norm": "layer", "bias": True},
    "llama": {"positions": "rotary", "mlp": "swiglu", "norm": "rms"},
}
_NEEDED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {  # their field -> the values that we support, the default first
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
        "quantization_config": (None,),
    },
    "llama": {"hidden_act": ("silu", "swish"), "quantization_config": (None,)},
}
_ARCHITECTURES = {"gpt2": ("GPT2LMHeadModel", "GPT2Model"), "llama": ("LlamaForCausalLM", "LlamaModel")}
_TURNS = {"low_freq_factor": SLOW_TURNS, "high_freq_factor": FAST_TURNS}
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read(file: Path) -> Json:
    """Reads a config.json; raises ValueError if it cannot be read."""
    try:
        found = small_files.read_json(file, _MOST_BYTES)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} is not a configuration: it must be a JSON object")
    return found


def model_of(given: Json, file: Path) -> ModelConfig:
    """The model that a config.json describes; options for training alone, such as dropout, have their defaults.

    Raises:
      ValueError: we do not support the architecture, or a field's value.
    """
    family = str(given.get("model_type"))
    if family not in _FIELDS:
        raise ValueError(f"{file}: model_type = {family!r}, and jaxshard supports {' and '.join(map(repr, _FIELDS))}")
    for name in given.get("architectures") or []:
        if name not in _ARCHITECTURES[family]:
            known = " and ".join(_ARCHITECTURES[family])
            raise ValueError(f"{file}: architectures has {name!r}, and jaxshard supports {known}")
    for field, values in _NEEDED[family].items():
        _require(file, field, given.get(field, values[0]), values)
    found = {ours: _value(given, theirs, default, file) for ours, (theirs, default) in _FIELDS[family].items()}
    found |= _FIXED[family]
    if family == "llama":
        _require(file, "mlp_bias", given.get("mlp_bias", False), (found["bias"],))
        found |= {"kv_heads": found["kv_heads"] or found["heads"], **_rotary(given, file)}
        found["sequence_length"] = min(found["sequence_length"], LONGEST)
    found["hidden"] = found["hidden"] or 4 * found["width"]
    model = ModelConfig(**found)
    try:
        check(Config(model=model))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    _require(file, "head_dim", given.get("head_dim"), (None, model.width // model.heads))
    return model


def family_of(model: ModelConfig) -> str:
    """The architecture that computes the same as the model.

    Raises:
      ValueError: it has none; the message names the options that rule it out.
    """
    family = "llama" if model.positions == "rotary" else "gpt2"
    one_each = {"kv_heads": model.heads} if family == "gpt2" and model.kv_heads else {}
    needed = {**_FIXED[family], **one_each}
    others = [name for name, value in needed.items() if getattr(model, name) != value]
    if others:
        wrong = ", ".join(f"model.{name} = {getattr(model, name)}" for name in others)
        right = ", ".join(f"{name} {needed[name]}" for name in others)
        raise ValueError(
            f"Hugging Face has no model with model.positions = {model.positions} and {wrong}: {family} has {right}"
        )
    return family


def described(model: ModelConfig, dtype: str, before: Json) -> Json:
    """The config.json of a model.

    Args:
      model: of a supported architecture.
      dtype: of its tensors.
      before: the config.json that the run started from, with special tokens and the longest text; {}: none.
    """
    family = family_of(model)
    found: Json = {"architectures": [_ARCHITECTURES[family][0]], "model_type": family, "torch_dtype": dtype}
    found |= {theirs: getattr(model, ours) for ours, (theirs, _) in _FIELDS[family].items()}
    found |= {field: values[0] for field, values in _NEEDED[family].items() if values[0] is not None}
    found |= {name: before.get(name) for name in _IDS}  # the defaults of transformers would be wrong tokens
    if family == "gpt2":
        return found | {"resid_pdrop": model.dropout, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    most = before.get("max_position_embeddings", 0)
    found |= {"max_position_embeddings": max(most, model.sequence_length), "mlp_bias": model.bias}
    found |= {"num_key_value_heads": model.kv_heads or model.heads, "rope_theta": model.rotary_base}
    if model.rotary_factor == 1:
        return found
    scaling: Json = {"rope_type": "llama3", "factor": model.rotary_factor, **_TURNS}
    return found | {"rope_scaling": scaling | {"original_max_position_embeddings": model.rotary_length}}


def _rotary(given: Json, file: Path) -> dict[str, Any]:
    """Our options of rotary positions. `transformers` has renamed the fields twice."""
    found: Json = {"rope_theta": given.get("rope_theta", 10_000.0)}
    for field in ("rope_scaling", "rope_parameters"):
        inner = given.get(field) or {}
        if not isinstance(inner, dict):
            raise ValueError(f"{file}: {field} = {inner!r} is not a JSON object")
        found |= inner
    _require(file, "partial_rotary_factor", found.get("partial_rotary_factor"), (None, 1, 1.0))
    kind = found.get("rope_type", found.get("type", "default"))
    _require(file, "the type of rope_scaling", kind, ("default", "llama3"))
    base = {"rotary_base": _number(found, "rope_theta", file)}
    if kind == "default":
        return base
    for field, value in _TURNS.items():
        _require(file, field, found.get(field), (value,))
    length = found.get("original_max_position_embeddings")
    if type(length) is not int:
        raise ValueError(f"{file}: original_max_position_embeddings = {length!r} is not an integer")
    factor = _number(found, "factor", file)
    return base | ({"rotary_factor": factor, "rotary_length": length} if factor != 1 else {})


def _value(given: Json, field: str, default: Any, file: Path) -> Any:
    """A field, converted to our option's type."""
    value = given.get(field, default)
    if isinstance(default, float):
        return _number({field: value}, field, file)
    kind = bool if isinstance(default, bool) else int
    if value is None and default is None:
        return 0
    if type(value) is not kind:
        raise ValueError(f"{file}: {field} = {value!r} is not {'true or false' if kind is bool else 'an integer'}")
    return value


def _number(given: Json, field: str, file: Path) -> float:
    value = given.get(field)
    if type(value) not in (int, float):
        raise ValueError(f"{file}: {field} = {value!r} is not a number")
    return float(value)  # pyright: ignore[reportArgumentType]


def _require(file: Path, field: str, value: Any, values: tuple[Any, ...]) -> None:
    if value not in values:
        shown = " or ".join(json.dumps(each) for each in values)
        raise ValueError(f"{file}: {field} = {json.dumps(value)}, and jaxshard supports only {shown}")


def in_words(model: ModelConfig) -> str:
    """The model's options that differ from the default, in one line."""
    plain = ModelConfig()
    fields = (field.name for field in dataclasses.fields(model))
    return ", ".join(f"model.{n} = {getattr(model, n)}" for n in fields if getattr(model, n) != getattr(plain, n))
