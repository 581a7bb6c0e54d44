"""Primitives are named in `programs/` alone, and listed in its table alone: the source of the package is read."""

import ast
import itertools
import pathlib
import typing

import pytest

import jaxshard
from jaxshard.programs.table import KINDS, ROWS, Kind

PACKAGE = pathlib.Path(jaxshard.__file__).parent
TABLE = "programs/table.py"
OTHER_WORDS = {
    "checkpoint/retention.py": "which of the measured values is the best",
    "inspect/overlap.py": "opcodes of HLO, the language of compiled programs",
    "inspect/schedule.py": "opcodes of HLO",
    "inspect/peak.py": "opcodes of HLO",
    "loss/loss_report.py": "words of JAX's error texts",
    "layout/checks.py": "options of other libraries",
    "__init__.py": "public names",
}
"""Modules whose words are also names of primitives, and what they are there."""


def modules(under="."):
    for path in sorted((PACKAGE / under).rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())


def texts(nodes):
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def collected(node):
    """The strings of a set, tuple, list or dict that is written out, or of words that are split."""
    if isinstance(node, ast.Set | ast.Tuple | ast.List):
        return texts(node.elts)
    if isinstance(node, ast.Dict):
        return texts(key for key in node.keys if key is not None)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "split":
        return [word for text in texts([node.func.value]) for word in text.split()]
    return []


def lists_of_primitives(tree):
    """(line, names) of each collection with at least two primitives in it; one by kinds of the table is none."""
    by_kind = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).startswith("dict[Kind, ")
    }
    for node in filter(lambda node: isinstance(node, ast.expr), ast.walk(tree)):
        found = sorted(ROWS.keys() & collected(node))
        if len(found) > 1 and id(node) not in by_kind:
            yield node.lineno, found


def is_name(node):
    """Whether an expression may be the name of an operation: `eqn.primitive.name`, `op.name`, a variable `name`."""
    return ast.unparse(node).rpartition(".")[2] == "name"


def compared_with_primitives(tree):
    """(line, names) of each comparison of a name with a primitive's, or with the beginning of such."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            found = [text for side in sides for text in texts([side]) + collected(side) if text in ROWS]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("startswith", "endswith")
        ):
            sides = [node.func.value]
            words = [text for given in node.args for text in texts([given]) + collected(given)]
            found = [word for word in words if sum(name.startswith(word) for name in ROWS) > 1]
        else:
            continue
        if found and any(map(is_name, sides)):
            yield node.lineno, found


def test_no_other_module_lists_primitives():
    found = {
        f"{path}:{line}": names
        for path, tree in modules()
        if not path.startswith("programs/") and path not in OTHER_WORDS
        for line, names in lists_of_primitives(tree)
    }
    assert found == {}


def test_no_other_module_names_a_primitive():
    """It asks a question of `programs/`, or compares with a constant of `programs.primitives`."""
    found = {
        f"{path}:{line}": names
        for path, tree in modules()
        if not path.startswith("programs/") and path not in OTHER_WORDS
        for line, names in compared_with_primitives(tree)
    }
    assert found == {}


def test_only_the_table_lists_primitives():
    found = {
        f"{path}:{line}": names
        for path, tree in modules()
        if path.startswith("programs/") and path != TABLE
        for line, names in lists_of_primitives(tree)
    }
    assert found == {}


def test_every_exception_is_needed():
    paths = {path for path, tree in modules() if [*lists_of_primitives(tree), *compared_with_primitives(tree)]}
    assert OTHER_WORDS.keys() - paths == set()


def test_a_primitive_is_compared_with_in_one_place():
    """Within `programs/` a single primitive is named once, as a constant; rules go by the table's kinds."""
    found = [
        name for path, tree in modules("programs") for _, names in compared_with_primitives(tree) for name in names
    ]
    assert len(found) == len(set(found)), found


def test_every_kind_has_a_primitive_and_every_word_a_list():
    assert {*KINDS.values()} == {*typing.get_args(Kind)}
    words = {word for row in ROWS.values() for word in row}
    source = (PACKAGE / "programs" / "primitives.py").read_text()
    assert {word for word in words if f'("{word}")' not in source} == set()


PLANTED = """
def f(eqn, name):
    if eqn.primitive.name == "scan":
        pass
    return name.startswith("reduce_") or name in {"add", "sub"}

FLAT = frozenset("mul div".split())
RULES = {"add": 1, "sub": 2}
KINDS: dict[Kind, int] = {"reshape": 1, "transpose": 2}
HLO: dict[str, int] = {"reshape": 1, "transpose": 2}
"""


@pytest.mark.parametrize(
    ("find", "lines"), [(lists_of_primitives, [5, 7, 8, 10]), (compared_with_primitives, [3, 5, 5])]
)
def test_what_is_looked_for_is_found(find, lines):
    assert sorted(line for line, _ in find(ast.parse(PLANTED))) == lines


def test_no_module_names_the_file_of_another():
    """What a higher module is, it says itself; a lower one that knows its name is an arrow that no import shows."""
    files = {path for path, _ in modules()} | {path.replace("/", ".").removesuffix(".py") for path, _ in modules()}
    files = {path for path in files if path.count("/") or path.count(".")}
    found = {}
    for path, tree in modules():
        names = sorted(files & {*itertools.chain(texts(ast.walk(tree)))})
        if names:
            found[path] = names
    assert found == {}
