"""What all processes of a run must have the same of: options, and what else decides the compiled step."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

import jax
import numpy as np
import optax

from jaxshard.apps.config.config import Config
from jaxshard.processes import ProcessError, gathered

_OF_JAX = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_default_prng_impl")
_MOST = 5  # settings that an error names
_LONGEST = 160  # characters of a setting that are shown


def check(config: Config) -> None:
    """Checks that all processes have the same settings.

    Raises:
      ProcessError: on every process, with the settings that differ, and what this or that process has.
    """
    everyone: list[dict[str, str]] = [json.loads(each) for each in gathered("start", json.dumps(_settings(config)))]
    first = everyone[0]
    for process, others in enumerate(everyone):
        names = [name for name in {**first, **others} if first.get(name) != others.get(name)]
        pairs = (f"{n}: process 0 has {_of(first, n)}, process {process} has {_of(others, n)}" for n in names[:_MOST])
        if names:
            more = f", and {len(names) - _MOST} more" if len(names) > _MOST else ""
            raise ProcessError(process, f"{'; '.join(pairs)}{more}: start all processes by the same command")


def _settings(config: Config) -> dict[str, str]:
    sections = {name: dataclasses.asdict(section) for name, section in vars(config).items()}
    options = {f"{name}.{key}": repr(value) for name, section in sections.items() for key, value in section.items()}
    versions = {package.__name__: package.__version__ for package in (jax, optax, np)}
    return options | versions | {name: repr(getattr(jax.config, name)) for name in _OF_JAX}


def _of(settings: Mapping[str, str], name: str) -> str:
    value = settings.get(name, "nothing")
    return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}..."
