"""Text that is shown: what comes from files and names cannot move the cursor, and commands can be copied."""

import shlex


def printable(text: str) -> str:
    r"""The text in one line, with what would move the cursor, or turn the text around, escaped.

    >>> print(printable("runs/a\nb\x1b[2J"))
    runs/a\nb\x1b[2J
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


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
