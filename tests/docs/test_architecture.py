"""Imports between the parts of jaxshard run one way, and the picture in docs/architecture.md shows them as they are."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from pages import ROOT

SPEC = importlib.util.spec_from_file_location("draw_imports", ROOT / "scripts" / "draw_imports.py")
draw_imports = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(draw_imports)
LIMITS = {"MAX_FILES": 12, "MAX_LEVELS": 2}


@pytest.fixture(scope="module")
def modules():
    return draw_imports.module_graph(ROOT / "jaxshard")


def test_no_circle_no_arrow_upwards_few_floors_and_arrows(modules):
    assert draw_imports.faults_of(modules) == []
    assert {name: getattr(draw_imports, name) for name in LIMITS} == LIMITS


def test_imports_are_found(modules):
    """A check that sees no import would pass whatever is imported."""
    rooms = draw_imports.room_graph(modules)
    assert len(modules) > 40
    assert set(rooms) == {
        *(path.name for path in (ROOT / "jaxshard").iterdir() if (path / "__init__.py").exists()),
        *(path.stem for path in (ROOT / "jaxshard").glob("*.py") if path.stem != "__init__"),
        "jaxshard",
    }
    assert rooms["base"] == rooms["system"] == set()
    assert {"apps", "plan", "checkpoint", "aot"} <= rooms["cli"]
    assert {"jaxshard", "pipelining"} <= rooms["apps"]
    assert "jaxshard.step.step" in modules["jaxshard.public"]


def test_the_pictures_show_the_imports_as_they_are(modules):
    """Where this fails: `python scripts/draw_imports.py --write`."""
    drawn = draw_imports.pictures(modules)
    assert {path: path.read_text() for path in drawn} == drawn
    assert set(draw_imports.WINGS.iterdir()) == drawn.keys() - {draw_imports.PICTURE}


def test_the_page_tells_each_room_and_the_figures(modules):
    rooms = draw_imports.room_graph(modules)
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert f"{draw_imports.summary(rooms)}; {draw_imports.summary(modules, 'files')}" in page
    told = set(re.findall(r"^\| `([\w./]+)` \|", page, re.M))
    names = {room if (ROOT / "jaxshard" / room).is_dir() else f"{room}.py" for room in rooms.keys() - {"jaxshard"}}
    assert told >= {name if name.endswith(".py") else f"{name}/" for name in names}


def planted(**imports):
    """Modules a, b, ... of rooms in their order, each with what it imports."""
    return {f"jaxshard.{name}": {f"jaxshard.{one}" for one in imported} for name, imported in imports.items()}


def test_a_circle_is_seen():
    (fault,) = draw_imports.faults_of(planted(base={"layout"}, layout={"base"}))[:1]
    assert fault == "a circle of imports: jaxshard.base -> jaxshard.layout -> jaxshard.base"


def test_a_circle_of_rooms_without_one_of_modules_is_seen():
    imports = {
        "jaxshard.base.a": {"jaxshard.layout.a"},
        "jaxshard.layout.a": set(),
        "jaxshard.layout.b": {"jaxshard.base.a"},
    }
    assert draw_imports.faults_of(imports) == ["a circle of imports: base -> layout -> base"]


def test_an_arrow_upwards_is_seen():
    assert draw_imports.faults_of(planted(base={"layout"}, layout=set())) == ["an arrow upwards: base imports layout"]


def test_a_room_that_the_order_does_not_name_is_seen():
    assert draw_imports.faults_of(planted(cellar=set())) == ["cellar is not in ORDER of scripts/draw_imports.py"]


def test_too_many_floors_and_arrows_are_seen(monkeypatch):
    for name, limit in {"MAX_FLOORS": 8, "MAX_ARROWS": 60, "MAX_FILE_FLOORS": 9, "MAX_FILE_ARROWS": 5.42}.items():
        monkeypatch.setattr(draw_imports, name, limit)
    tower = planted(**{room: set(draw_imports.ORDER[:index]) for index, room in enumerate(draw_imports.ORDER[:12])})
    assert draw_imports.faults_of(tower) == [
        "12 floors of rooms, at most 8",
        "66 arrows of rooms, at most 60",
        "12 floors of files, at most 9",
        "66 arrows of files, at most 65",
    ]


def test_a_wing_of_too_many_files_is_seen():
    wing = {"jaxshard.loss": set(), **{f"jaxshard.loss.part{i}": set() for i in range(12)}}
    assert draw_imports.faults_of(wing) == ["jaxshard.loss has 13 files, at most 12"]


def test_a_wing_too_deep_is_seen():
    deep = {"jaxshard.loss.a.b.c": set(), "jaxshard.loss.a.b": set(), "jaxshard.loss.a": set(), "jaxshard.loss": set()}
    assert draw_imports.faults_of(deep) == ["jaxshard.loss.a.b lies 3 levels deep, at most 2"]


def test_a_circle_within_a_wing_is_seen():
    imports = {
        "jaxshard.loss.a.x": {"jaxshard.loss.b"},
        "jaxshard.loss.a.y": set(),
        "jaxshard.loss.b": {"jaxshard.loss.a.y"},
    }
    assert draw_imports.faults_of(imports) == ["a circle of imports: a -> b -> a"]


@pytest.mark.parametrize(
    "line",
    [
        "import jaxshard.b",
        "from jaxshard import b",
        "from jaxshard.b import x",
        "def f():\n    from jaxshard import b",
        "if TYPE_CHECKING:\n    import jaxshard.b as c",
    ],
)
def test_every_kind_of_import_is_seen(line):
    modules = dict.fromkeys(["jaxshard", "jaxshard.a", "jaxshard.b"])
    assert draw_imports.imports_of(line, "jaxshard.a", modules) == {"jaxshard.b"}


def test_the_page_tells_the_modules_that_a_step_enters():
    """Where this fails: put into docs/architecture.md what `python scripts/walk_step.py` prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", str(ROOT / "scripts" / "walk_step.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("first: ")
    assert done.stdout in (ROOT / "docs" / "architecture.md").read_text()
