"""Text that is shown: what comes from files and names cannot move the cursor, and commands can be copied."""

import shlex


class LinesError(ValueError):
    """Its message may have several lines, each of which tells something. That of another error is one line."""


def printable(text: str) -> str:
    r"""The text in one line, with what would move the cursor, or turn the text around, escaped.

    >>> print(printable("runs/a\nb\x1b[2J"))
    runs/a\nb\x1b[2J
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str, most: int = 2000) -> str:
    """The text, without the middle of one that nobody would read.

    >>> shortened("a" * 3000)[998:1030]
    'aa ... 1,000 characters ... aaaa'
    """
    half = most // 2
    left_out = len(text) - 2 * half
    return text if left_out <= 0 else f"{text[:half]} ... {left_out:,} characters ... {text[-half:]}"


def printable_lines(text: str) -> str:
    """The same, of several lines."""
    return "\n".join(map(printable, text.split("\n")))


def shell_command(*words: str) -> str:
    r"""A command for a shell, in one line.

    >>> print(shell_command("ls", "my runs", "a\nb"))
    ls 'my runs' $'a\x0ab'
    """
    return " ".join(shlex.quote(word) if word.isprintable() else f"$'{_escaped(word)}'" for word in words)


def _escaped(word: str) -> str:
    """As shells read it between $' and '."""
    return "".join(c if c.isprintable() and c not in "'\\" else _escape(c) for c in word)


def _escape(c: str) -> str:
    return f"\\x{ord(c):02x}" if c < "\x80" else f"\\u{ord(c):04x}" if c < "\U00010000" else f"\\U{ord(c):08x}"
