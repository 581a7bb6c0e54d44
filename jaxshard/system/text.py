"""Text for terminals and notebooks: safe to print, commands to copy, sizes in words, tables, mistyped names."""

import difflib
import functools
import html
import inspect
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")
_CELL = 'style="text-align: left; vertical-align: top"'


class LinesError(ValueError):
    """An error whose message may have several meaningful lines; other errors' messages are shown as one line."""


def printable(text: str) -> str:
    r"""The text in one line; characters that would move the cursor or reverse the text are escaped.

    >>> print(printable("runs/a\nb\x1b[2J"))
    runs/a\nb\x1b[2J
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str, most: int = 2000) -> str:
    """The text; without its middle if it is too long to read.

    >>> shortened("a" * 3000)[998:1030]
    'aa ... 1,000 characters ... aaaa'
    """
    half = most // 2
    left_out = len(text) - 2 * half
    return text if left_out <= 0 else f"{text[:half]} ... {left_out:,} characters ... {text[-half:]}"


def printable_lines(text: str) -> str:
    """As `printable`, for several lines."""
    return "\n".join(map(printable, text.split("\n")))


def shell_command(*words: str) -> str:
    r"""A command for a shell, in one line.

    >>> print(shell_command("ls", "my runs", "a\nb"))
    ls 'my runs' $'a\x0ab'
    """
    return " ".join(shlex.quote(word) if word.isprintable() else f"$'{_escaped(word)}'" for word in words)


def _escaped(word: str) -> str:
    """A word escaped for shells' $'...'."""
    return "".join(c if c.isprintable() and c not in "'\\" else _escape(c) for c in word)


def _escape(c: str) -> str:
    return f"\\x{ord(c):02x}" if c < "\x80" else f"\\u{ord(c):04x}" if c < "\U00010000" else f"\\U{ord(c):08x}"


def size_in_words(num_bytes: float) -> str:
    """A size in bytes, to three significant digits, in a suitable unit.

    Args:
      num_bytes: the size, in bytes.

    >>> size_in_words(16_100_000_000)
    '16.1 GB'
    """
    unit, scale = unit_of(num_bytes)
    return f"{digits(num_bytes / scale)} {unit}"


def seconds_in_words(seconds: float) -> str:
    """A time, to three significant digits, in seconds or milliseconds.

    Args:
      seconds: the time, in seconds.

    >>> seconds_in_words(0.0153)
    '15.3 ms'
    """
    return f"{digits(seconds)} s" if seconds >= 0.9995 else f"{digits(seconds * 1e3)} ms"


def unit_of(num_bytes: float) -> tuple[str, float]:
    """(a suitable unit for a size, the bytes in that unit); 1 kB is 1000 B.

    >>> unit_of(262_144)
    ('kB', 1000.0)
    """
    units = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
    return next((pair for pair in units if abs(num_bytes) >= 0.9995 * pair[1]), units[-1])


def digits(value: float) -> str:
    """A number to three significant digits; all digits before the point are kept.

    >>> digits(1344.5), digits(0.01534)
    ('1,344', '0.0153')
    """
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def size_from_words(words: str) -> int:
    """Reads a size in B, kB, MB, GB or TB (powers of 1000), and returns it in bytes.

    Raises:
      ValueError: `words` is not a number with one of these units.

    >>> size_from_words("5GB"), size_from_words("1.5 mb")
    (5000000000, 1500000)
    """
    scales = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]?b)", words.strip().lower())
    if not found:
        raise ValueError(f"{words!r} is not a size: write a number and B, kB, MB, GB or TB, such as 5GB")
    return round(float(found[1]) * scales[found[2]])


def ordinal(number: int) -> str:
    """An ordinal number.

    >>> [ordinal(n) for n in (1, 2, 3, 4, 11, 22, 112)]
    ['1st', '2nd', '3rd', '4th', '11th', '22nd', '112th']
    """
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: a similar known name, or "".

    >>> nearest("tensr", ["data", "tensor"]), nearest("tp", ["data", "tensor"])
    ("; did you mean 'tensor'?", '')
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def checks_names(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The function; for a keyword that it does not take, it raises a TypeError with the nearest keyword and all others.

    >>> @checks_names
    ... def make(*, data=1, replica=1): ...
    >>> make(replicas=2)
    Traceback (most recent call last):
    TypeError: make: unknown argument 'replicas'; did you mean 'replica'? It takes data, replica
    """
    parameters = inspect.signature(function).parameters
    known = [name for name in parameters if name != "self"]
    more = next((x.name for x in parameters.values() if x.kind is inspect.Parameter.VAR_POSITIONAL), None)
    name = function.__qualname__.split(".")[-2] if function.__name__ == "__call__" else function.__name__

    @functools.wraps(function)
    def checked(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        unknown = next((name for name in kwargs if name not in known or name == more), None)
        if unknown is None:
            return function(*args, **kwargs)
        if more is not None:
            raise without_names(name, unknown, ", ".join(f"*{name}" if name == more else name for name in known))
        hint = nearest(unknown, known) or "."
        raise TypeError(f"{name}: unknown argument {unknown!r}{hint} It takes {', '.join(known)}")

    return checked


def without_names(who: str, given: str, taken: str) -> TypeError:
    """The error of a function whose further arguments have no names.

    >>> without_names("step", "key", "params, *args")
    TypeError("step: unknown argument 'key'; further arguments have no names: call it (params, *args)")
    """
    return TypeError(f"{who}: unknown argument {given!r}; further arguments have no names: call it ({taken})")


def html_table(rows: Iterable[Sequence[str]], notes: Iterable[str] = ()) -> str:
    """An HTML table, its first row the headings, with a line for each note below.

    >>> html_table([("leaf", "bytes"), ("w", "8")], ["1 leaf < 2"]).count("<tr>")
    2
    """
    head, *body = rows
    lines = [_line("th", head), *(_line("td", row) for row in body)]
    below = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return f"<table>{''.join(lines)}</table>{below}"


def _line(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag} {_CELL}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
