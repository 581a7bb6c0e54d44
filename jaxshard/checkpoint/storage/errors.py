"""What a checkpoint's errors say."""

import errno
from pathlib import Path

import jax


class CorruptCheckpointError(RuntimeError):
    """What was read is not what was saved.

    Attributes:
      step: of the checkpoint; None: `from_bytes` raised it.
      leaf: the path of the first leaf that shows it; None: it is not known.
    """

    def __init__(self, step: int | None, leaf: str | None, reason: str):
        what = "these bytes are" if step is None else f"checkpoint {step} is"
        super().__init__(f"{what} corrupt: {leaf + ': ' if leaf else ''}{reason}")
        self.step, self.leaf = step, leaf


class NewerFormatError(ValueError):
    """A checkpoint has a format that only a newer jaxshard reads.

    Attributes:
      step: of the checkpoint; None: `from_bytes` raised it.
      found: the number of its format.
    """

    def __init__(self, step: int | None, found: int, known: int):
        what = "these bytes have" if step is None else f"checkpoint {step} has"
        super().__init__(f"{what} format {found}, and this jaxshard reads formats up to {known}: update jaxshard")
        self.step, self.found = step, found


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 400 characters; the error's type, if it has no message.

    >>> first_line(ValueError("no such file\\nat line 3"))
    'no such file'
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0][:400]


def not_installed(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error for a package that checkpoints need, with the command that installs it."""
    return ModuleNotFoundError(f'{error}; it comes with: pip install "jaxshard[checkpoint]"', name=error.name)


def not_saved(step: int, errors: dict[int, BaseException], path: Path) -> OSError:
    """The error of a save that failed with `errors` (process -> error): this process's own, else the first."""
    error = errors.get(jax.process_index()) or next(iter(errors.values()))
    text = first_line(error)
    if "No space left" in str(error) or getattr(error, "errno", None) == errno.ENOSPC:
        number, reason = errno.ENOSPC, "no space left on the disk"
    else:
        number, reason = getattr(error, "errno", None) or errno.EIO, "it could not be written"
    made = OSError(number, f"checkpoint {step} was not saved: {reason}; older ones are whole ({text})", str(path))
    made.__cause__ = error
    return made
