"""A Hugging Face folder as the start of a run; reads its tensors leaf by leaf, each shard to its device."""

from __future__ import annotations

import collections
import dataclasses
import errno
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxshard.apps.config.config import ModelConfig
from jaxshard.apps.data.token_files import MOST_TOKENIZER_BYTES, TOKENIZER
from jaxshard.apps.huggingface import hf_config, hf_names, safetensors_file
from jaxshard.apps.huggingface.hf_names import HEAD, PREFIXES, Rule
from jaxshard.apps.model import linear
from jaxshard.apps.runs.run_folder import RunFolder
from jaxshard.system import small_files
from jaxshard.system.files import make_folder, replace

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
KEPT = (
    *(CONFIG, "generation_config.json", TOKENIZER, "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"),
)
"""The files of its start that a run keeps for its own export."""

_INDEX = f"{WEIGHTS}.index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_BUFFERS = re.compile(r"(^|\.)h\.\d+\.attn\.(bias|masked_bias)$|\.rotary_emb\.inv_freq$")
_FLOATS = ("F16", "BF16", "F32", "F64")


@dataclasses.dataclass(frozen=True)
class HuggingFaceFolder:
    """A folder whose tensors all have a place in our model.

    Attributes:
      path: the folder.
      model: from its config.json.
      dtype: the computation's, to suit its tensors.
      places: each tensor's full name -> its file, and its name there.
      who: begins messages.
    """

    path: Path
    model: ModelConfig
    dtype: str
    places: Mapping[str, tuple[Path, str]]
    who: str

    def params(self, template: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Its parameters by our paths, as a run has them before its first step.

        Args:
          template: shapes with types and shardings by path, the layers in one stack. Its adapters are skipped;
            matrices with scales are quantized to 8 bits.

        Raises:
          FloatingPointError: a number is not finite, or overflows the template's type.
          OSError: it cannot be read.
        """
        found: dict[str, jax.Array] = {}
        for rule in hf_names.rules(self.model):
            found |= linear.finite(self.who, self._read(rule, template))
        return found

    def _read(self, rule: Rule, template: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        like, scale = template[rule.path], f"{rule.path}_scale"
        if scale not in template:
            return {rule.path: self._leaf(rule, like)}
        wide = self._leaf(rule, jax.ShapeDtypeStruct(like.shape, "float32", sharding=like.sharding))
        shardings = like.sharding, template[scale].sharding
        codes, scales = jax.jit(linear.quantized, out_shardings=shardings)(wide)
        return {rule.path: codes, scale: scales.astype(template[scale].dtype)}

    def _leaf(self, rule: Rule, like: jax.ShapeDtypeStruct) -> jax.Array:
        """A leaf with the type and sharding of `like`. Holds this host's shards and one layer's tensors in memory."""
        sharding, shape = like.sharding, like.shape
        assert isinstance(sharding, NamedSharding)
        wanted = sharding.addressable_devices_indices_map(shape).values()
        parts = {_ends(index, shape): np.empty(sharding.shard_shape(shape), like.dtype) for index in wanted}
        for layer in range(shape[0]) if rule.is_stacked else [None]:
            here = {ends: part for ends, part in parts.items() if layer is None or ends[0][0] <= layer < ends[0][1]}
            whole = self._joined(rule, layer) if here else np.empty(0)
            for ends, part in here.items():
                at = tuple(slice(*each) for each in ends)
                with np.errstate(over="ignore"):  # overflow is detected later, with the leaf's name
                    part[... if layer is None else layer - ends[0][0]] = whole[at if layer is None else at[1:]]
        return jax.make_array_from_callback(shape, sharding, lambda index: parts[_ends(index, shape)])

    def _joined(self, rule: Rule, layer: int | None) -> np.ndarray:
        return rule.join(*(safetensors_file.tensor(*self.places[name.format(layer)]) for name in rule.names))


def is_one(path: Path) -> bool:
    """Whether a path looks like Hugging Face weights, valid or not: a folder, a file in it, or its index."""
    if path.name.endswith((".safetensors", ".safetensors.index.json")) or path.name in (CONFIG, *_PICKLES):
        return True
    if not path.is_dir() or (path / "config.toml").is_file():
        return False
    names = (CONFIG, WEIGHTS, _INDEX, *_PICKLES, "snapshots")
    return any((path / name).exists() for name in names)


def opened(path: Path, option: str) -> HuggingFaceFolder:
    """Checks a folder, or a file in it: its configuration, and the names, shapes and types of all tensors.

    Raises:
      ValueError: we do not support the model, or a tensor is missing, unknown or of a wrong shape.
    """
    who, folder = f"{option} {path}", path if path.is_dir() else path.parent
    files = _files(folder if path.name == CONFIG else path, who)
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{who}: {CONFIG}, which describes the model, is not in {folder}")
    given = hf_config.read(folder / CONFIG)
    model = hf_config.model_of(given, folder / CONFIG)
    found = _in_files(files, who)
    if model.layers > len(found):
        raise ValueError(f"{who}: {CONFIG} says {model.layers} layers, and the folder has {len(found)} tensors")
    places = _named(found, PREFIXES[hf_config.family_of(model)], who)
    _check_tensors(model, places, {place: shape for place, (shape, _) in found.items()}, who)
    dtypes = {name: found[place][1] for name, place in places.items()}
    wrong = [f"{name} ({dtype})" for name, dtype in dtypes.items() if dtype not in _FLOATS]
    if wrong:
        raise ValueError(f"{who}: {_some(wrong)}: jaxshard reads {', '.join(_FLOATS)}")
    narrow = set(dtypes.values()) == {"BF16"}
    return HuggingFaceFolder(folder, model, "bfloat16" if narrow else "float32", places, who)


def kept_of(path: Path) -> Path:
    """The folder with the files `KEPT` of a start: the Hugging Face folder, or the run's copy."""
    if not is_one(path):
        return RunFolder(path).huggingface
    return path if path.is_dir() else path.parent


def keep(start: Path, target: Path) -> None:
    """Copies those of `KEPT` that exist to the folder `target`, which it makes if there are any.

    Raises:
      OSError: a file cannot be read, is too large, or is a link out of the folder.
    """
    place = kept_of(start)
    if not is_one(start) and place.is_dir():  # a run's own folder
        check_inside(place)
    found = [file for name in KEPT if (file := place / name).is_file()]
    for file in found:
        check_inside(file)
        make_folder(target)
        replace(target / file.name, small_files.read(file, MOST_TOKENIZER_BYTES))


def check_inside(file: Path) -> None:
    """Raises OSError for a link out of the folder, except within Hugging Face's cache, whose files are all links."""
    folder, real = file.parent.resolve(), file.resolve()
    cache = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    if real.parent not in (folder, cache):
        raise OSError(errno.EPERM, f"it is a link to {real}: replace it by the file itself", str(file))


# The files and their content.

_Place = tuple[Path, str]
_Found = dict[_Place, tuple[tuple[int, ...], str]]  # a tensor's place -> its shape and type


def _files(path: Path, who: str) -> Mapping[Path, set[str] | None]:
    """The weights' files; with an index, also the names that each must have."""
    if not path.exists():
        raise ValueError(f"{who}: the file does not exist")
    if path.name in _PICKLES:
        raise ValueError(f"{who}: {_no_pickle(path.parent)}")
    if path.is_file():
        return _indexed(path, who) if path.suffix == ".json" else {path: None}
    if (path / WEIGHTS).is_file():
        return {path / WEIGHTS: None}
    if (path / _INDEX).is_file():
        return _indexed(path / _INDEX, who)
    if any((path / name).exists() for name in _PICKLES):
        raise ValueError(f"{who}: {_no_pickle(path)}")
    if (path / "snapshots").is_dir():
        inner = sorted(str(each) for each in (path / "snapshots").iterdir())
        raise ValueError(f"{who} is a Hugging Face cache: give one of its snapshots: {', '.join(inner) or 'none'}")
    raise ValueError(f"{who}: it has neither {WEIGHTS} nor {_INDEX}")


def _no_pickle(folder: Path) -> str:
    load = f"transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})"
    return (
        f"{_PICKLES[0]} is a pickle, which can run code, so jaxshard does not open it: write {WEIGHTS} with "
        f"""python -c "import transformers; {load}.save_pretrained('NEW')\""""
    )


def _indexed(index: Path, who: str) -> Mapping[Path, set[str]]:
    names = hf_config.read(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ValueError(f"{who}: {index.name} has no weight_map")
    found: dict[Path, set[str]] = collections.defaultdict(set)
    for name, file in names.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{who}: {index.name} does not name a file of this folder for {name}: {file!r}")
        found[index.parent / file].add(name)
    gone = [file.name for file in found if not file.is_file()]
    if gone:
        raise ValueError(f"{who}: {_some(gone)}, named by {index.name}, {_is(gone)} missing")
    return found


def _in_files(files: Mapping[Path, set[str] | None], who: str) -> _Found:
    found: _Found = {}
    for file, promised in files.items():
        try:
            tensors = safetensors_file.entries(file)
        except (ValueError, OSError) as error:
            raise ValueError(f"{who}: {file.name} cannot be read: {error}") from error
        found |= {(file, name): (entry.shape, entry.dtype) for name, entry in tensors.items()}
        if promised is not None and promised != set(tensors):
            raise ValueError(
                f"{who}: {file.name} has different tensors than its index: {_some(promised ^ set(tensors))}"
            )
    return found


def _named(found: _Found, prefix: str, who: str) -> dict[str, _Place]:
    """The tensors' places by full name, without buffers that can be recomputed."""
    places: dict[str, _Place] = {}
    for file, name in found:
        if _BUFFERS.search(name):
            continue
        full = name if name == HEAD or name.startswith(prefix) else prefix + name
        if full in places:
            raise ValueError(f"{who}: {name} occurs twice, with the prefix {prefix} and without")
        places[full] = file, name
    return places


def _check_tensors(
    model: ModelConfig, places: dict[str, _Place], shapes: Mapping[_Place, tuple[int, ...]], who: str
) -> None:
    """Raises ValueError unless the tensors and the model's parameters correspond one to one."""
    wanted = hf_names.tensors(model)
    if model.tied and HEAD in places:
        _check_head(places, next(iter(wanted)), who)
    missing, others = [n for n in wanted if n not in places], [places[n][1] for n in places if n not in wanted]
    if missing:
        raise ValueError(f"{who}: {_some(missing)} {_is(missing)} missing{_unknown(others)}")
    if others:
        raise ValueError(f"{who}: {_some(others)} {_is(others)} not in the model that {CONFIG} describes")
    for name, (*_, shape) in wanted.items():
        if shapes[places[name]] != shape:
            raise ValueError(f"{who}: {name} has the shape {shapes[places[name]]}; by {CONFIG} it has {shape}")


def _check_head(places: dict[str, _Place], embedding: str, who: str) -> None:
    """Removes a head that repeats the embedding."""
    place = places.pop(HEAD)
    if embedding in places and not np.array_equal(
        safetensors_file.tensor(*place), safetensors_file.tensor(*places[embedding])
    ):
        raise ValueError(
            f"{who}: {HEAD} differs from {embedding}, but {CONFIG} sets tie_word_embeddings: set it to false"
        )


def _ends(index: Sequence[slice] | None, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(start, stop) of a shard in each dim."""
    assert index is not None
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))


def _some(names: Any) -> str:
    listed = sorted(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _unknown(others: Sequence[str]) -> str:
    return f", and {_some(others)} {_is(others)} unknown" if others else ""
