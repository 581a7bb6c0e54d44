"""The recorded models of `make_hf_fixtures.py`, runs made from models, and their logits."""

import json
import pathlib

import jax
import numpy as np
from safetensors import numpy as safetensors_numpy

import jaxshard
from jaxshard.apps.config import toml
from jaxshard.apps.config.devices import make_mesh
from jaxshard.apps.model import linear
from jaxshard.apps.model.model import LanguageModel
from jaxshard.apps.runs.run_folder import RunFolder
from jaxshard.apps.trainer import generate, parts

RECORDED = pathlib.Path(__file__).parent / "hf"
NAMES = ("gpt2", "llama", "llama_tied")


def expected(name):
    """The recorded tokens, logits and greedy tokens of `transformers`."""
    return dict(np.load(RECORDED / name / "expected.npz"))


def logits_of(model, params, tokens):
    """Logits (B, L, V), token by token through the cache."""
    cache, found = model.empty_cache(len(tokens)), []
    step = jax.jit(model.extended)
    for i in range(tokens.shape[1]):
        logits, cache = step(params, tokens[:, i : i + 1].astype(np.int32), cache, i)
        found.append(np.asarray(logits))
    return np.stack(found, 1)


def greedy_of(model, params, prompt, count):
    """The likeliest tokens after the prompt."""
    tokens = generate.generated(model, params, prompt, generate.Sampling(temperature=0))
    return [next(tokens) for _ in range(count)]


def saved_run(folder, config, params, **others):
    """Makes the folder of a run with these saved parameters."""
    RunFolder(folder).begin(toml.dump(config), 0)
    with jaxshard.checkpoint.Checkpointer(folder / "model") as saves:
        saves.save(3, {"params": params, **others})
    return folder


def placed(config, found):
    """(model, optimizer, parameters of an opened folder) under the strategy of a configuration."""
    mesh = make_mesh(config.sharding)
    model, _, opt, template = parts.make_parts(config, mesh)
    return model, opt, linear.nested(found.params(linear.by_path(template)))


def fresh(config, scale=1.0):
    """A run's fresh parameters, none of them 0 or 1, on one device."""
    model = LanguageModel(config.model, lora=config.lora)
    flat = linear.by_path(model.init(jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), len(flat))
    noisy = {
        path: scale * (x + 0.1 * jax.random.normal(key, x.shape))
        for (path, x), key in zip(flat.items(), keys, strict=True)
    }
    return model, linear.nested(noisy)


def tensors_of(folder):
    """All tensors of a Hugging Face folder, from one file or from an index's files."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return safetensors_numpy.load_file(folder / "model.safetensors")
    places = json.loads(index.read_text())["weight_map"]
    files = {file: safetensors_numpy.load_file(folder / file) for file in set(places.values())}
    return {name: files[file][name] for name, file in places.items()}
