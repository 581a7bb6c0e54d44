"""The command line of `jaxshard train`: merges it with a TOML file, and checks it against the run's folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from jaxshard.apps.commands import arguments as words
from jaxshard.apps.config import toml
from jaxshard.apps.config.checks import check
from jaxshard.apps.config.config import Arguments, Config, ModelConfig, OptimizerConfig
from jaxshard.apps.huggingface import hf_config, hf_folder
from jaxshard.apps.records import profile
from jaxshard.apps.runs.run_folder import RunFolder
from jaxshard.apps.trainer import finished_run
from jaxshard.apps.trainer.vocabulary import check_tokenizer

_DESCRIPTION = "Train a byte-level transformer with a sharded optimizer; every option can also be set in CONFIG.toml."
_COMMAND = "jaxshard train"


@dataclasses.dataclass(frozen=True)
class Given(Arguments):
    """The command line, with notes about it.

    Attributes:
      notes: one line each.
      typed: the data paths from the command line itself, which may name functions.
    """

    notes: tuple[str, ...] = ()
    typed: tuple[str, ...] = ()


def parse(arguments: Sequence[str]) -> Given:
    """Merges the command line, the TOML file (given, or of the run to resume) and the defaults, in this priority.

    Raises:
      ValueError: names the option that is wrong. (For a parse error, it prints the message and raises SystemExit.)
    """
    words.check(arguments, Arguments, _COMMAND, {"data": str})
    given = words.by_tyro(arguments, Arguments, _COMMAND, _DESCRIPTION, Arguments())
    file, notes, goes_on_by_itself = given.config, [], False
    typed = tuple(path for path in (given.data.path, given.data.heldout_path) if path is not None)
    if (given.resume or given.resume_if_saved) and given.out is None:
        raise ValueError("--resume needs --out DIR, the folder of the run to resume")
    if given.out is not None:
        folder = RunFolder(given.out)
        if given.resume:
            folder.check_saved(configured=file is not None)
        goes_on_by_itself = _goes_on(given) and file is None
        if goes_on_by_itself:
            file, notes = folder.config, _check_own(folder)
    in_file: frozenset[str] = frozenset()
    if file is not None:
        config, in_file = toml.parsed(file, pipes=not goes_on_by_itself)
        given = words.by_tyro(arguments, Arguments, _COMMAND, _DESCRIPTION, Arguments(**vars(config)))
    if given.profile is not None:
        profile.steps_in(given.profile)
    _check_encodable("--data", given.data.path)
    _check_encodable("--out", given.out)
    _check_encodable("--train.start", given.train.start)
    if given.train.start is not None and not _goes_on(given) and not hf_folder.is_one(Path(given.train.start)):
        finished_run.opened(Path(given.train.start), "train.start =")
    model, model_notes = (given.model, []) if goes_on_by_itself else model_of_start(given, arguments, in_file)
    warmup = "optimizer.warmup_steps"
    optimizer, note = fitting_warmup(given, warmup in in_file or words.is_given(arguments, warmup))
    changed = {"model": model, "optimizer": optimizer, "notes": (*notes, *model_notes, *note), "typed": typed}
    given = Given(**(vars(given) | changed))
    check(given)
    return given


def model_of_start(config: Config, arguments: Sequence[str], in_file: Collection[str]) -> tuple[ModelConfig, list[str]]:
    """The model's options; if `train.start` names a Hugging Face folder, those not given come from there.

    Args:
      config: as given.
      arguments: the command line.
      in_file: the keys in CONFIG.toml.

    Returns:
      (the options, notes to print).

    Raises:
      ValueError: our model cannot compute the folder's, or a given option contradicts the folder.
    """
    start, model = config.train.start, config.model
    if start is None or not hf_folder.is_one(Path(start)):
        return model, []
    before, found = finished_run.opened(Path(start), "train.start =")
    names = {field.name for field in dataclasses.fields(ModelConfig)} - set(finished_run.FREE[1:])
    unnamed = [name for name in names if not _is_named(f"model.{name}", arguments, in_file)]
    model = dataclasses.replace(model, **{name: getattr(before.model, name) for name in unnamed})
    finished_run.check_same_model(found, before.model, model)
    return model, [f"the model's options come from {start}: {hf_config.in_words(model)}"] if unnamed else []


def _is_named(key: str, arguments: Sequence[str], in_file: Collection[str]) -> bool:
    return key in in_file or any(words.is_given(arguments, each) for each in (key, key.replace(".", ".no_")))


def fitting_warmup(config: Config, is_given: bool) -> tuple[OptimizerConfig, list[str]]:
    """The optimizer's options; shortens the default warm-up if it would leave no step, unless the user set it.

    Returns:
      (the options, notes to print).

    >>> from jaxshard.apps.config.config import TrainConfig
    >>> _, (note,) = fitting_warmup(Config(train=TrainConfig(steps=30)), is_given=False)
    >>> note
    'optimizer.warmup_steps = 3, since the default, 50, is too long for train.steps = 30'
    """
    given, steps = config.optimizer, config.train.steps
    if is_given or given.warmup_steps < steps or steps < 1:
        return given, []
    shorter = dataclasses.replace(given, warmup_steps=steps // _STEPS_PER_WARMUP_STEP)
    default = f"the default, {given.warmup_steps}, is too long for train.steps = {steps}"
    return shorter, [f"optimizer.warmup_steps = {shorter.warmup_steps}, since {default}"]


_STEPS_PER_WARMUP_STEP = 8  # as in the defaults


def check_folder(given: Arguments, folder: RunFolder, config: Config) -> tuple[bool, list[str]]:
    """Returns (whether the run resumes from the folder, notes to print).

    Raises:
      ValueError: the folder cannot be used for this run.
    """
    goes_on = _goes_on(given)
    if given.profile is not None:
        taken = folder.latest_step() if goes_on else 0
        profile.check(profile.steps_in(given.profile), config.train.steps - (taken or 0))
    if goes_on:
        check_tokenizer(config, folder.path, f"--out {folder.path}")
        notes = _compared(folder, config)
        finished_run.check_saved_sizes(folder, config.model, f"--out {folder.path}")
        return True, notes
    if given.resume_if_saved:
        folder.check_unsaved()
    else:
        folder.check_free()
    return False, []


def _goes_on(given: Arguments) -> bool:
    """Whether the run resumes: the user asks for it, and something is saved."""
    return given.resume or (given.resume_if_saved and given.out is not None and RunFolder(given.out).is_saved())


def _check_encodable(name: str, path: str | Path | None) -> None:
    """Raises ValueError for a path that cannot be written to config.toml or shown."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} {str(path)!r}: the name is not UTF-8: rename it") from None


def _check_own(folder: RunFolder) -> list[str]:
    """Checks that a run's own configuration is as the run wrote it; returns notes to print.

    A deliberate edit looks like disk damage, so the user must confirm it by naming the file.
    """
    try:
        state, lacking = toml.looked_at(folder.config)
    except ValueError as error:
        raise ValueError(f"--resume: {error}; {folder.cure()}") from None
    if state == "changed":
        cure = folder.cure(folder.config)
        raise ValueError(
            f"--resume: {folder.config} was changed after the run wrote it; if you changed it yourself, {cure}"
        )
    if not lacking:
        return []
    more = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
    names = ", ".join(lacking[:5]) + more
    return [f"{folder.config} lacks {names}: an older jaxshard wrote it, or it was truncated; defaults are used"]


def _compared(folder: RunFolder, config: Config) -> list[str]:
    """Compares the run's options with the saved ones; returns notes to print.

    The type of sums (precision.reduce) may change.

    Raises:
      ValueError: an option would change the saved arrays or the random numbers, or leave no step.
    """
    taken = folder.latest_step() or 0
    if config.train.steps < taken:
        raise ValueError(
            f"train.steps = {config.train.steps}: the run in {folder.path} has taken {taken} steps: set more"
        )
    try:
        before, (state, _) = toml.load(folder.config), toml.looked_at(folder.config)
    except ValueError as error:
        return [f"{error}; so the options are not compared with the saved run's options"]
    saved, given = _saved_as(before), _saved_as(config)
    changes = ", ".join(
        f"{name} = {given[name]!r}, saved {value!r}" for name, value in saved.items() if value != given[name]
    )
    if changes and state == "changed":
        return [f"{folder.config} was changed after the run wrote it, and its options differ: {changes}"]
    if changes:
        raise ValueError(
            f"--resume: the run saved in {folder.path} has different options: {changes}; keep these as saved"
        )
    return _other_heldout(before, config)


def _other_heldout(before: Config, now: Config) -> list[str]:
    """Notes if the held-out text differs from before."""
    changes = [
        f"data.{name} = {getattr(now.data, name)}, saved {getattr(before.data, name)}"
        for name in ("heldout", "heldout_bytes")
        if getattr(now.data, name) != getattr(before.data, name)
    ]
    if not changes:
        return []
    seen = "the model was trained on some of it, and " if now.data.heldout > before.data.heldout else ""
    return [f"{', '.join(changes)}: the held-out text differs: {seen}its loss is not comparable with earlier ones"]


def _saved_as(config: Config) -> dict[str, Any]:
    """The options that determine the saved arrays, their meaning, and the random numbers."""
    sections = {name: dataclasses.asdict(getattr(config, name)) for name in ("model", "lora", "precision")}
    sections |= {
        "optimizer": {"name": config.optimizer.name},
        "train": {"seed": config.train.seed, "start": config.train.start},
    }
    del sections["precision"]["reduce"]
    return {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}
