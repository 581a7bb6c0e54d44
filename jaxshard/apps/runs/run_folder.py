"""The folder of a run: `config.toml`, `metrics.jsonl`, `tensorboard/`, `loss.png`, `model/<step>/`.

Files are replaced atomically or appended to by the line, and the model's folder appears in one move, so a reader never
sees half-written files.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

from jaxshard.apps.config import paths, seal
from jaxshard.apps.data.token_files import MOST_TOKENIZER_BYTES, TOKENIZER
from jaxshard.apps.runs import metrics
from jaxshard.apps.runs.metrics import Record
from jaxshard.checkpoint import Checkpointer
from jaxshard.system import files, small_files
from jaxshard.system.command import check_room
from jaxshard.system.files import replace
from jaxshard.system.text import shell_command


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Paths of a run's files, and the checks that keep runs apart."""

    path: Path

    @property
    def config(self) -> Path:
        """The options of the run, in TOML."""
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        """The metrics, a JSON object on each line."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard's events."""
        return self.path / "tensorboard"

    @property
    def huggingface(self) -> Path:
        """Copies of the configuration and the tokenizer of the Hugging Face folder that the run started from."""
        return self.path / "huggingface"

    @property
    def trackers(self) -> Path:
        """The run's ids in wandb and trackio, in JSON."""
        return self.path / "trackers.json"

    @property
    def profile(self) -> Path:
        """The folder of a trace of some steps."""
        return self.path / "profile"

    @property
    def tokenizer(self) -> Path:
        """A copy of the tokenizer that made the run's tokens."""
        return self.path / TOKENIZER

    @property
    def figure(self) -> Path:
        """The loss curves, a PNG."""
        return self.path / "loss.png"

    @property
    def model(self) -> Path:
        """The folder of the saved models."""
        return self.path / "model"

    def check_free(self) -> None:
        """Raises ValueError if the folder has files that a new run would collide with."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"--out {self.path} is a file: give a folder")
        if self.latest_step() is not None:
            raise ValueError(
                f"--out {self.path} holds a run saved at step {self.latest_step()}: resume it with --resume, or give a "
                "different folder"
            )
        if self.path.exists() and any(self.path.iterdir()) and not self._is_begun():
            raise ValueError(f"--out {self.path} is not empty: give a new folder")
        check_room("--out", self.path)

    def check_unsaved(self) -> None:
        """Raises ValueError if the folder has more than a run leaves that ended before its first save."""
        self._check_restorable()
        if self.config.is_file() and not self.model.is_dir():  # the run makes `model` first
            raise ValueError(
                f"--out {self.path}: it has {self.config.name} but not {self.model.name}/: restore that, or give a "
                "different folder to start a new run"
            )
        if not self.config.is_file() and not self._is_begun():
            self.check_free()

    def _is_begun(self) -> bool:
        """Whether there is only the lock of the saves, which a run makes first, and perhaps one unfinished file."""
        if not self.path.is_dir() or self.latest_step() is not None:
            return False
        names = {entry.name for entry in self.path.iterdir() if not files.is_temporary(entry.name)}
        return names == {self.model.name}

    def is_saved(self) -> bool:
        """Whether the folder has a saved run."""
        return self.config.is_file() and self.latest_step() is not None

    def check_saved(self, configured: bool) -> None:
        """Raises ValueError if the folder has no saved run, or its options are missing and not `configured`."""
        self._check_restorable()
        if self.latest_step() is None:
            hint = "" if self.path.exists() else paths.near_path(self.path)
            raise ValueError(f"--resume: no saved run in --out {self.path}: give the folder that the run printed{hint}")
        if not configured and not self.config.is_file():
            raise ValueError(f"--resume: {self.config} is missing; {self.cure()}")

    def cure(self, config: str | Path = "CONFIG.toml") -> str:
        """Advice if the run's own configuration is missing or not trusted."""
        command = shell_command("jaxshard", "train", str(config), "--resume", "--out", str(self.path))
        return f"give the file that has its options: {command}"

    def _check_restorable(self) -> None:
        """Raises ValueError if there are saved models, but none is intact."""
        saves = Checkpointer(self.model)
        if (damaged := saves.damaged()) and not saves.steps():
            step, missing = max(damaged.items())
            raise ValueError(
                f"--out {self.path}: no saved model is complete: {missing} is missing in {self.model / str(step)}: "
                "restore it, or give a different folder to start a new run"
            )

    def latest_step(self) -> int | None:
        """The step of the newest saved model."""
        return max(Checkpointer(self.model).steps(), default=None)

    def keep_tokenizer(self, tokenizer: Path | None) -> None:
        """Copies the tokenizer, if there is one, for `jaxshard generate`."""
        if tokenizer is not None and tokenizer.resolve() != self.tokenizer.resolve():
            replace(self.tokenizer, small_files.read(tokenizer, MOST_TOKENIZER_BYTES))

    def complete(self, config: str, tokenizer: Path | None) -> list[str]:
        """Writes the options and the tokenizer if they are missing; returns notes to print."""
        self.path.mkdir(parents=True, exist_ok=True)
        missing = [path for path in (self.config, self.tokenizer) if not os.path.lexists(path)]
        if self.config in missing:
            replace(self.config, seal.sealed(config))
        if self.tokenizer in missing and tokenizer is not None and tokenizer.is_file():
            self.keep_tokenizer(tokenizer)
        return [f"{path} was missing: it is written again" for path in missing if path.exists()]

    def is_configured(self, config: str) -> bool:
        """Whether the run's options are these, unchanged."""
        wanted = seal.sealed(config).encode()
        try:
            return small_files.read(self.config, len(wanted)) == wanted
        except OSError:
            return False

    def records(self) -> list[Record]:
        """The metrics so far that can be read."""
        return metrics.read(self.metrics).records

    def begin(self, config: str, step: int) -> list[str]:
        """Prepares the folder of a run, new or resumed, that has taken `step` steps; returns notes to print.

        Files or folders that obstruct the run's own, except for the model's, are moved aside.
        """
        files.make_folder(self.path)
        notes = [
            self._cleared(path, Path.is_file)
            for path in (self.config, self.metrics, self.trackers, self.tokenizer, self.figure)
        ]
        folders = (self.tensorboard, self.huggingface, self.profile, self.path / "wandb")
        notes += [self._cleared(path, lambda path: path.is_dir() and not path.is_symlink()) for path in folders]
        if self.model.is_symlink():
            notes.append(f"{self.model} is a link: models are saved in {self.model.resolve()}")
        replace(self.config, seal.sealed(config))
        notes.append(self.forget_after(step))
        return [note for note in notes if note]

    def forget_after(self, step: int) -> str:
        """Drops the metrics of steps after `step`, which were not saved and will be repeated.

        Returns:
          Notes to print: lines that are not metrics are moved to another file.
        """
        try:
            found = metrics.read(self.metrics)
        except OSError as error:
            return self._moved_aside(self.metrics, f"cannot be read ({error.strerror})")
        kept = [json.dumps(record) + "\n" for record in found.records if record["step"] <= step]
        replace(self.metrics, "".join(kept))
        if not found.others:
            return ""
        others = self.metrics.with_name(f"{self.metrics.name}.others")
        try:
            with files.append(others) as file:
                file.writelines(found.others)
                files.sync_file(file)
            where = f"are now in {others.name}"
        except OSError as error:
            where = f"are lost ({error.strerror})"
        return f"{self.metrics}: {len(found.others)} of its lines are not metrics, and {where}"

    def sync(self) -> None:
        """Syncs all files here to disk, except the models, which are synced when saved."""
        files.sync_tree(self.path, but=[self.model.name])

    def _cleared(self, path: Path, is_right: Callable[[Path], bool]) -> str:
        """Moves aside a path of the wrong kind (file or folder); returns notes to print."""
        if not os.path.lexists(path) or is_right(path):
            return ""
        kind = "not a file" if is_right is Path.is_file else "a link" if path.is_dir() else "not a folder"
        return self._moved_aside(path, f"is {kind}")

    def _moved_aside(self, path: Path, why: str) -> str:
        names = (path.with_name(f"{path.name}.aside{number or ''}") for number in itertools.count())
        aside = next(name for name in names if not os.path.lexists(name))
        files.rename(path, aside)
        return f"{path} {why}: it is now {aside.name}"
