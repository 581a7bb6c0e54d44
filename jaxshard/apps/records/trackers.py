"""Logs a run's metrics to wandb or trackio: a resumed run continues there, and one that goes back becomes a new one."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxshard.apps.config import toml
from jaxshard.apps.config.config import Config
from jaxshard.apps.runs.run_folder import RunFolder
from jaxshard.system import small_files
from jaxshard.system.files import replace

_FINISH_SECONDS = 60  # for wandb to send what is left
_PROJECT = "jaxshard"
_MOST_BYTES = 2**16  # of the file with the two ids


def check(names: Sequence[str]) -> None:
    """Raises ValueError if a tracker is not installed, or has no API key."""
    for name in set(names) & TRACKERS.keys():
        TRACKERS[name].check(_imported(name))


def folders(names: Sequence[str]) -> list[str]:
    """The sub-folders of a run's folder that these loggers write."""
    return [name for name in names if name not in TRACKERS or TRACKERS[name].has_folder]


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # of any type, if its own dependencies are broken
        raise ValueError(
            f'train.log_to has {name}, which cannot be imported ({error}): pip install "jaxshard[{name}]"'
        ) from error


def _check_key(wandb: Any) -> None:
    if wandb.setup().settings.mode in ("online", "shared") and not wandb.login(prompt=False, verify=False):
        raise ValueError(
            "train.log_to has wandb, but no API key is set: run `wandb login`, or set WANDB_MODE=offline and upload "
            "the run later with `wandb sync`"
        )


_Kind = tuple[int, frozenset[str]]


@dataclasses.dataclass(frozen=True)
class Before:
    """The state of a run's folder before the run goes on from step `first`.

    Attributes:
      first: the number of steps already taken.
      beyond: (step, names) of the records of later steps, from a killed process.
      same: whether all options are unchanged, so that these steps will be repeated exactly.
    """

    first: int
    beyond: frozenset[_Kind] = frozenset()
    same: bool = True


def before(folder: RunFolder, config: Config, first: int) -> Before:
    """Reads a run's folder; call it before `folder.begin`."""
    try:
        beyond = frozenset(_kind(record) for record in folder.records() if record["step"] > first)
    except OSError:  # `folder.begin` reports it
        beyond = frozenset()
    return Before(first, beyond, not beyond or folder.is_configured(toml.dump(config)))


def _kind(record: Mapping[str, Any]) -> _Kind:
    return record["step"], frozenset(record) - {"step"}


class Tracker:
    """A run in wandb or trackio, which have the same functions.

    Neither can delete records. So if steps are repeated differently, a new run starts, with all records before them.

    Args:
      name: "wandb" or "trackio".
      folder: of the run; stores the tracker's id of the run.
      config: of the run.
      found: the state of the folder.
    """

    def __init__(self, name: str, folder: RunFolder, config: Config, found: Before):
        self._name, self._folder, self._config = name, folder, config
        self._seen = found.beyond if found.same else frozenset[_Kind]()
        self._begin(self._ids().get(name) if found.same else None, found.first)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Records the values of `scalars` after `step` steps, once."""
        if (step, frozenset(scalars)) not in self._seen:
            self._run.log(dict(scalars), step=step)

    def rewind(self, step: int) -> None:
        """Starts a new run, with the records up to `step`."""
        self.close()
        self._seen = frozenset()
        self._begin(None, step)

    def close(self) -> None:
        """Sends what is left, within a limited time."""
        self._run.finish()

    def _begin(self, id: str | None, step: int) -> None:
        """Continues the run `id`, or starts one with the records up to `step`."""
        is_new, id = id is None, id or secrets.token_hex(4)
        self._run = TRACKERS[self._name].begin(
            _imported(self._name), self._folder, dataclasses.asdict(self._config), id
        )
        if is_new:
            self._keep(id)
            for record in self._folder.records():
                if record["step"] <= step:
                    self.write(record["step"], {name: value for name, value in record.items() if name != "step"})

    def _ids(self) -> dict[str, str]:
        """tracker -> its id of the run; ignores invalid ids."""
        try:
            found = small_files.read_json(self._folder.trackers, _MOST_BYTES)
        except (OSError, ValueError):
            return {}
        pairs = found.items() if isinstance(found, dict) else ()
        return {name: id for name, id in pairs if isinstance(id, str) and re.fullmatch("[0-9a-f]{8}", id)}

    def _keep(self, id: str) -> None:
        text = json.dumps(self._ids() | {self._name: id}) + "\n"
        replace(self._folder.trackers, text)


def _wandb_run(wandb: Any, folder: RunFolder, config: dict[str, Any], id: str) -> Any:
    return wandb.init(
        project=os.environ.get("WANDB_PROJECT") or _PROJECT,
        name=folder.path.absolute().name,
        id=id,
        dir=str(folder.path),
        config=config,
        allow_val_change=True,
        resume="allow",
        settings=wandb.Settings(console="off", finish_timeout=_FINISH_SECONDS, finish_timeout_raises=True),
    )


def _trackio_run(trackio: Any, folder: RunFolder, config: dict[str, Any], id: str) -> Any:
    """A run in trackio, which identifies runs by name."""
    name = f"{folder.path.absolute().name}-{id}"
    return trackio.init(project=_PROJECT, name=name, config=config, resume="allow", embed=False)


class _Tracker(NamedTuple):
    """The functions of one tracker, which take its module.

    Attributes:
      begin: (module, folder, configuration, the run's id there) -> its run, continued if it exists.
      check: raises ValueError if it could not send.
      has_folder: whether it writes a folder of its name in the run's.
    """

    begin: Callable[[Any, RunFolder, dict[str, Any], str], Any]
    check: Callable[[Any], None] = lambda module: None
    has_folder: bool = False


TRACKERS = {"wandb": _Tracker(_wandb_run, _check_key, has_folder=True), "trackio": _Tracker(_trackio_run)}
