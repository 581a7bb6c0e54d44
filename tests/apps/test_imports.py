"""The applications stand on public names alone, so that they could leave the package at any time.

Besides public names they import `jaxshard.system`, which has nothing of sharding: they would take it along.
"""

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).parents[2] / "jaxshard"
APPS = sorted((PACKAGE / "apps").rglob("*.py"))
LINES = (PACKAGE.parent / "tests" / "public_api.txt").read_text().splitlines()
NAMES = {line.partition("(")[0] for line in LINES}
MODULES = {"jaxshard", *(module for module, _, _ in (name.rpartition(".") for name in NAMES) if module.islower())}
OWN = ("jaxshard.apps.", "jaxshard.system.")


def imports(source):
    """The modules and names of jaxshard that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            found |= {f"{prefix}{alias.name}" for alias in node.names}
    return {name for name in found if f"{name}.".startswith("jaxshard.")}


def private_imports(source):
    """Those that are neither public nor the applications' own."""
    return sorted(name for name in imports(source) - NAMES - MODULES if not f"{name}.".startswith(OWN))


@pytest.mark.parametrize("path", APPS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_public_names_are_imported(path):
    assert private_imports(path.read_text()) == []


def test_system_imports_nothing_else_of_jaxshard():
    paths = sorted((PACKAGE / "system").glob("*.py"))
    assert len(paths) > 5
    for path in paths:
        assert {name for name in imports(path.read_text()) if not name.startswith("jaxshard.system.")} == set(), path


def test_the_public_names_are_known():
    assert {"jaxshard.zero2", "jaxshard.plan.chip", "jaxshard.checkpoint.Checkpointer.save"} <= NAMES
    assert {"jaxshard", "jaxshard.plan", "jaxshard.mesh", "jaxshard.processes"} <= MODULES
    assert len(APPS) > 40


@pytest.mark.parametrize(
    ("line", "private"),
    [
        ("import jaxshard.step.step", "jaxshard.step.step"),
        ("from jaxshard import step", "jaxshard.step"),
        ("from jaxshard.mesh import platform_of", "jaxshard.mesh.platform_of"),
        ("from jaxshard.processes.agreement import meet", "jaxshard.processes.agreement.meet"),
        ("from jaxshard.checkpoint.storage.leaves import Entry", "jaxshard.checkpoint.storage.leaves.Entry"),
        ("from jaxshard.cli import main", "jaxshard.cli.main"),
        ("from jaxshard.systems import x", "jaxshard.systems.x"),
        ("def f():\n    from jaxshard.base.tree import shape_of", "jaxshard.base.tree.shape_of"),
    ],
)
def test_a_private_import_is_seen(line, private):
    fine = "import jax\nimport jaxshard\nfrom jaxshard import aot, zero2\nfrom jaxshard.plan import chip\n"
    fine += "from jaxshard.system import files\nfrom jaxshard.apps.config import toml\n"
    assert private_imports(fine) == []
    assert private_imports(fine + line) == [private]
