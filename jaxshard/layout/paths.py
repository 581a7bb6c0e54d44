"""Values that a user gives for leaves: by regular expressions on paths, or by a tree or prefix of values."""

import difflib
from collections.abc import Mapping, Sequence

from jaxshard.base.tree import Names, first_rules, path_of
from jaxshard.base.types import T


def by_rules(what: str, rules: Sequence[tuple[str, T]], leaves: Sequence[Names], otherwise: T) -> tuple[list[T], str]:
    """(for each leaf, the value of the first rule that matches its path; the error of an unused rule, or "")."""
    paths = ["/".join(names) for names in leaves]
    found, idle = first_rules(what, [rule for rule, _ in rules], paths)
    wrong = ""
    if idle is not None:
        near = difflib.get_close_matches(idle, paths, n=3, cutoff=0.0)
        wrong = f"{what}: the rule {idle!r} matches no parameter; mend or drop it. The nearest paths: {near}"
    return [otherwise if i is None else rules[i][1] for i in found], wrong


def by_tree(what: str, given: Mapping[Names, T], leaves: Sequence[Names], absent: str) -> tuple[list[T], str]:
    """(for each leaf, the value that is given at its path, or above it; the error of an unused value, or "").

    Raises:
      ValueError: nothing is given for a leaf; `absent` is the message, with {} for its path.
    """
    places = [next((names[:n] for n in range(len(names), -1, -1) if names[:n] in given), None) for names in leaves]
    for names, place in zip(leaves, places, strict=True):
        if place is None:
            raise ValueError(f"{what}: {absent.format(path_of(names))}")
    extra = next((names for names in given if names not in places), None)
    wrong = "" if extra is None else f"{what}: {path_of(extra)} is no parameter; drop it, or mend its path"
    return [given[place] for place in places if place is not None], wrong
