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
LIMITS = {"MAX_FLOORS": 8, "MAX_ARROWS": 60}


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
    assert rooms["base"] == set()
    assert {"trainer", "plan", "checkpoint", "aot"} <= rooms["cli"]
    assert {"jaxshard", "core", "pipelining"} <= rooms["trainer"]
    assert "jaxshard.step.step" in modules["jaxshard"]


def test_the_picture_shows_the_imports_as_they_are(modules):
    """Where this fails: `python scripts/draw_imports.py --write`."""
    assert draw_imports.PICTURE.read_text() == draw_imports.svg(draw_imports.room_graph(modules))


def test_the_page_tells_each_room_and_the_figures(modules):
    rooms = draw_imports.room_graph(modules)
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert draw_imports.summary(rooms) in page
    told = set(re.findall(r"^\| `([\w./]+)` \|", page, re.M))
    names = {room if (ROOT / "jaxshard" / room).is_dir() else f"{room}.py" for room in rooms.keys() - {"jaxshard"}}
    assert told >= {name if name.endswith(".py") else f"{name}/" for name in names}


def planted(**imports):
    """Modules a, b, ... of rooms in their order, each with what it imports."""
    return {f"jaxshard.{name}": {f"jaxshard.{one}" for one in imported} for name, imported in imports.items()}


def test_a_circle_is_seen():
    (fault,) = draw_imports.faults_of(planted(base={"core"}, core={"base"}))[:1]
    assert fault == "a circle of imports: jaxshard.base -> jaxshard.core -> jaxshard.base"


def test_a_circle_of_rooms_without_one_of_modules_is_seen():
    imports = {"jaxshard.base.a": {"jaxshard.core.a"}, "jaxshard.core.a": set(), "jaxshard.core.b": {"jaxshard.base.a"}}
    assert draw_imports.faults_of(imports) == ["a circle of imports: base -> core -> base"]


def test_an_arrow_upwards_is_seen():
    assert draw_imports.faults_of(planted(base={"core"}, core=set())) == ["an arrow upwards: base imports core"]


def test_a_room_that_the_order_does_not_name_is_seen():
    assert draw_imports.faults_of(planted(cellar=set())) == ["cellar is not in ORDER of scripts/draw_imports.py"]


def test_too_many_floors_and_arrows_are_seen(monkeypatch):
    tower = planted(**{room: set(draw_imports.ORDER[:index]) for index, room in enumerate(draw_imports.ORDER[:12])})
    assert draw_imports.faults_of(tower) == ["12 floors, at most 8", "66 arrows, at most 60"]


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
