"""The text of `jaxshard COMMAND --help`: one look for all commands, wrapped at the terminal's width.

It needs nothing but Python, until it reads a dataclass of options.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import shutil
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

_LEAST_WIDTH = 40
_LONGEST_CHOICES = 40  # characters of choices behind an option's name; longer ones follow its text
_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}
HELP = ("-h, --help", "Show this text.")


class Section(NamedTuple):
    """A part of a page.

    Attributes:
      title: its heading.
      rows: (option or argument, its text); a text may be "".
      text: below the heading.
    """

    title: str
    rows: Sequence[tuple[str, str]]
    text: str = ""


def page(usage: str, description: str, sections: Sequence[Section]) -> str:
    """The text of a help page; paragraphs of `description` are separated by blank lines."""
    width = max(shutil.get_terminal_size().columns, _LEAST_WIDTH)
    parts = [_wrapped(f"usage: {usage}", width, 0, 7)]
    parts += [_wrapped(paragraph, width, 0) for paragraph in description.split("\n\n")]
    for section in sections:
        lines = [f"{section.title}:", *([_wrapped(section.text, width, 2)] if section.text else [])]
        for name, text in section.rows:
            lines += [_wrapped(name, width, 2, 6), *([_wrapped(text, width, 10)] if text else [])]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _wrapped(text: str, width: int, indent: int, later: int | None = None) -> str:
    return textwrap.fill(
        " ".join(text.split()),
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent if later is None else later),
        break_long_words=False,
        break_on_hyphens=False,
    )


def of_dataclass(kind: type, command: str, description: str, shows: Callable[[str], bool] = lambda option: True) -> str:
    """The page of a command whose options are a dataclass, with dataclasses for sections.

    Args:
      kind: the dataclass; a string below each field is its text.
      command: as the user types it.
      description: of the command.
      shows: whether the page shows an option, such as train.steps.
    """
    sections: list[Section] = []
    own = [each for each in _options_of(kind) if not dataclasses.is_dataclass(each.hint)]
    for title, options in (("arguments", [each for each in own if each.positional]), ("options", own)):
        rows = [each.row() for each in options if each.positional == (title == "arguments")]
        sections.append(Section(title, [*rows, *([HELP] if title == "options" else [])]))
    for each in _options_of(kind):
        if dataclasses.is_dataclass(each.hint):
            inner = list(_options_of(typing.cast(type, each.hint), f"{each.name}."))
            rows = [option.row() for option in inner if shows(option.name)]
            sections.append(Section(f"{each.name} options", rows, (each.hint.__doc__ or "").partition("\n\n")[0]))
    positional = "".join(f" {each.metavar or each.name.upper()}" for each in own if each.positional)
    usage = f"{command} [OPTIONS]{positional}"
    return page(usage, description, [section for section in sections if section.rows])


def of_function(function: Callable[..., Any], command: str) -> str:
    """The page of a command that is a function, whose docstring has a section Args."""
    text, _, listed = inspect.cleandoc(function.__doc__ or "").partition("\n\nArgs:\n")
    texts, hints = _arguments_in(listed), typing.get_type_hints(function, include_extras=True)
    options = [
        _Option.of(name, hints[name], parameter.default, texts.get(name, ""), off=True)
        for name, parameter in inspect.signature(function).parameters.items()
    ]
    positional = [each for each in options if each.positional]
    usage = f"{command} [OPTIONS]{''.join(f' {each.metavar}' for each in positional)}"
    rows = [each.row() for each in options if not each.positional]
    return page(
        usage, text, [Section("arguments", [each.row() for each in positional]), Section("options", [*rows, HELP])]
    )


def _arguments_in(listed: str) -> dict[str, str]:
    """name -> text, in a docstring's section Args."""
    found: dict[str, str] = {}
    for line in textwrap.dedent(listed).splitlines():
        name, colon, text = line.partition(": ")
        if colon and not line.startswith(" "):
            found[name] = f"{text[:1].upper()}{text[1:]}"
        elif found:
            found[[*found][-1]] += f" {line.strip()}"
    return {name: text if text.endswith(".") else f"{text}." for name, text in found.items()}


@dataclasses.dataclass(frozen=True)
class _Option:
    """An option or argument. `paired`: a flag that has a negative form."""

    name: str
    hint: Any
    default: object
    text: str
    metavar: str | None = None
    aliases: tuple[str, ...] = ()
    positional: bool = False
    paired: bool = False

    @classmethod
    def of(cls, name: str, hint: Any, default: object, text: str, off: bool = False) -> _Option:
        import tyro

        marks = getattr(hint, "__metadata__", ())
        bare = typing.get_args(hint)[0] if marks else hint
        if typing.get_origin(bare) in (typing.Union, types.UnionType):
            (bare,) = (each for each in typing.get_args(bare) if each is not type(None))
        given = next((each for each in marks if hasattr(each, "metavar")), None)
        return cls(
            name,
            bare,
            default,
            text,
            metavar=getattr(given, "metavar", None),
            aliases=tuple(getattr(given, "aliases", None) or ()),
            positional=tyro.conf.Positional in marks,
            paired=bare is bool and not off and tyro.conf.FlagCreatePairsOff not in marks,
        )

    def row(self) -> tuple[str, str]:
        """(the names with what follows them, the text with the default)."""
        text = f"{self.text}{self._default()}"
        if self.positional:
            return self.metavar or self.name.upper(), text
        long = f"--{self.name.replace('_', '-')}"
        if self.hint is bool:
            section, dot, last = long.rpartition(".")
            return (f"{long}, {section}{dot}no-{last}" if self.paired else long), text
        metavar, choices = self._takes()
        return ", ".join(f"{name} {metavar}" for name in (*self.aliases, long)), f"{text}{choices}"

    def _takes(self) -> tuple[str, str]:
        """(what follows the name, a sentence with the choices if they are many)."""
        several = typing.get_origin(self.hint) is tuple
        one = typing.get_args(self.hint)[0] if several else self.hint
        metavar, sentence = self.metavar or _METAVARS.get(one, "TEXT"), ""
        if typing.get_origin(one) is Literal:
            choices = [str(each) for each in typing.get_args(one) if each]
            metavar = f"{{{','.join(choices)}}}"
            if len(metavar) > _LONGEST_CHOICES:
                metavar, sentence = "NAME", f" One of {', '.join(choices)}."
        return f"[{metavar} ...]" if several else metavar, sentence

    def _default(self) -> str:
        """The default in brackets; "" where the text says it, or there is none to show."""
        if "default" in self.text or self.default in (None, "", (), "\n") or self.default is inspect.Parameter.empty:
            return ""
        if isinstance(self.default, bool):
            return f" (default: {'on' if self.default else 'off'})" if self.paired else ""
        value = self.default
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
        return f" (default: {f'{shown:g}' if isinstance(shown, float) else shown})"


def _options_of(kind: type, prefix: str = "") -> Iterator[_Option]:
    """The fields of a dataclass, in their order; those of the class itself before those that it inherits."""
    hints, texts = typing.get_type_hints(kind, include_extras=True), _texts_in(kind)
    for field in dataclasses.fields(kind):
        default = None if field.default is dataclasses.MISSING else field.default
        yield _Option.of(f"{prefix}{field.name}", hints[field.name], default, texts.get(field.name, ""))


def _texts_in(kind: type) -> Mapping[str, str]:
    """field -> the string below it."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(tree, ast.ClassDef)
        for field, below in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
                found[field.target.id] = str(ast.literal_eval(below.value))
    return found
