"""Draws which part of jaxshard imports which, and checks it: `python scripts/draw_imports.py [--write]`.

How it counts: a room is a folder or a file at the top of `jaxshard/`. An arrow goes from a room to another that any of
its modules imports, anywhere in the file: at the top, within a function, or for types only. A room's floor is one above
the highest that it imports. The script exits with 1 where there is a circle (of rooms or of modules), an arrow upwards
in `ORDER`, more than 8 floors, or more than 60 arrows. `--write` writes docs/architecture.svg.
"""

import argparse
import ast
import pathlib
import sys
from collections.abc import Iterator, Mapping
from html import escape

ROOT = pathlib.Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "architecture.svg"
MAX_FLOORS, MAX_ARROWS = 8, 60

# From the ground up: a room imports only rooms that stand before it.
ORDER = (
    *("base", "hardware", "processes", "mesh", "rows", "inner", "digest", "guards", "core", "inspect", "aot"),
    *("pipelining", "tensor", "plan", "checkpoint", "jaxshard", "bench", "trainer", "cli", "__main__"),
)

Graph = Mapping[str, set[str]]


def modules_of(package: pathlib.Path) -> dict[str, pathlib.Path]:
    """Every module's dotted name and file; a package's name stands for its `__init__`."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(source: str, name: str, modules: Mapping[str, pathlib.Path]) -> set[str]:
    """The modules of the same package that a module's source imports."""
    asked = {target for node in ast.walk(ast.parse(source)) for target in _targets(node, modules)}
    return {target for target in asked if target in modules and target != name}


def _targets(node: ast.AST, modules: Mapping[str, pathlib.Path]) -> Iterator[str]:
    """`from a import b` is an import of the module a.b, where there is one, else of a."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        if node.level:
            raise ValueError(f"line {node.lineno}: a relative import; write the whole path")
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            yield inner if inner in modules else str(node.module)


def module_graph(package: pathlib.Path) -> dict[str, set[str]]:
    """What each module imports."""
    modules = modules_of(package)
    return {name: imports_of(path.read_text(), name, modules) for name, path in modules.items()}


def room_of(module: str) -> str:
    """The room of a module: what follows the package's name, or that name.

    >>> room_of("jaxshard.core.layout"), room_of("jaxshard")
    ('core', 'jaxshard')
    """
    return [*module.split("."), ""][1] or module


def room_graph(modules: Graph) -> dict[str, set[str]]:
    """What each room imports of others."""
    rooms: dict[str, set[str]] = {room_of(module): set() for module in modules}
    for module, imported in modules.items():
        rooms[room_of(module)] |= {room_of(one) for one in imported} - {room_of(module)}
    return rooms


def circle(graph: Graph) -> list[str]:
    """The nodes of one circle, the first again at its end; empty if there is none.

    >>> circle({"a": {"b"}, "b": {"a"}})
    ['a', 'b', 'a']
    """
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        done.add(node)
        return next(filter(None, (visit(following, [*path, node]) for following in sorted(graph[node]))), [])

    return next(filter(None, (visit(node, []) for node in sorted(graph))), [])


def floors_of(graph: Graph) -> dict[str, int]:
    """Each node's floor, from 1. Raises ValueError for a circle.

    >>> floors_of({"core": {"base"}, "base": set()})
    {'core': 2, 'base': 1}
    """
    if circle(graph):
        raise ValueError("a circle of imports: " + " -> ".join(circle(graph)))
    return {node: _height(node, graph) for node in graph}


def _height(node: str, graph: Graph) -> int:
    return 1 + max((_height(below, graph) for below in graph[node]), default=0)


def faults_of(modules: Graph) -> list[str]:
    """What the house's rules forbid, one sentence each."""
    rooms = room_graph(modules)
    circles = [found for found in (circle(modules), circle(rooms)) if found]
    if circles:
        return ["a circle of imports: " + " -> ".join(found) for found in circles]
    faults = [f"{room} is not in ORDER of scripts/draw_imports.py" for room in rooms if room not in ORDER]
    if faults:
        return faults
    for room, imported in rooms.items():
        above = sorted(one for one in imported if ORDER.index(one) > ORDER.index(room))
        faults += [f"an arrow upwards: {room} imports {one}" for one in above]
    num_floors, num_arrows = max(floors_of(rooms).values()), sum(map(len, rooms.values()))
    faults += [f"{num_floors} floors, at most {MAX_FLOORS}"] if num_floors > MAX_FLOORS else []
    return faults + ([f"{num_arrows} arrows, at most {MAX_ARROWS}"] if num_arrows > MAX_ARROWS else [])


def summary(rooms: Graph) -> str:
    """The picture's figures in words."""
    num_floors, num_arrows = max(floors_of(rooms).values()), sum(map(len, rooms.values()))
    return f"{len(rooms)} rooms, {num_floors} floors, {num_arrows} arrows"


# The picture: floors from the ground up, each arrow from a room's lower edge to the upper edge of what it imports.

WIDTH, ROW, BOX_WIDTH, BOX_HEIGHT, MARGIN = 1000, 104, 124, 38, 40


def svg(rooms: Graph) -> str:
    """The picture of the rooms, as text."""
    floors = floors_of(rooms)
    places = _places(floors)
    height = 2 * MARGIN + ROW * (max(floors.values()) - 1) + BOX_HEIGHT
    arrows = [_arrow(places[room], places[one]) for room in sorted(rooms) for one in sorted(rooms[room])]
    boxes = [_box(room, *place) for room, place in sorted(places.items())]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f"<title>Imports between the parts of jaxshard: {summary(rooms)}</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#607080"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        *arrows,
        *boxes,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _places(floors: Mapping[str, int]) -> dict[str, tuple[float, float]]:
    """The middle of each box's upper edge; a floor's boxes are spread over the width."""
    places = {}
    for floor in set(floors.values()):
        here = sorted((room for room in floors if floors[room] == floor), key=ORDER.index)
        for index, room in enumerate(here):
            x = WIDTH * (index + 0.5 + 0.18 * (-1) ** floor) / len(here)  # floors are shifted, so arrows part
            places[room] = (round(x), MARGIN + ROW * (max(floors.values()) - floor))
    return places


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    (x1, y1), (x2, y2) = start, end
    y1 += BOX_HEIGHT
    bend = (y2 - y1) / 2
    curve = f"M{x1:g} {y1:g}C{x1:g} {y1 + bend:g} {x2:g} {y2 - bend:g} {x2:g} {y2 - 2:g}"
    return f'<path d="{curve}" fill="none" stroke="#607080" stroke-opacity="0.55" marker-end="url(#tip)"/>'


def _box(room: str, x: float, y: float) -> str:
    is_folder = (ROOT / "jaxshard" / room).is_dir()
    name = {"jaxshard": "__init__.py"}.get(room, room + ("/" if is_folder else ".py"))
    fill = "#dcebf7" if is_folder else "#fdf3d8"
    return (
        f'<rect x="{x - BOX_WIDTH / 2:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" fill="{fill}" '
        f'stroke="#34495e"/><text x="{x:g}" y="{y + 25:g}" text-anchor="middle" font-size="16">{escape(name)}</text>'
    )


def main() -> int:
    """Prints the figures and the faults; returns 1 if there is any fault."""
    parser = argparse.ArgumentParser(description="Checks the imports between the parts of jaxshard, and draws them.")
    parser.add_argument("--write", action="store_true", help=f"write {PICTURE.relative_to(ROOT)}")
    given = parser.parse_args()
    modules = module_graph(ROOT / "jaxshard")
    faults = faults_of(modules)
    if not circle(room_graph(modules)):
        rooms = room_graph(modules)
        print(f"{summary(rooms)}, {len(modules)} modules")
        floors = floors_of(rooms)
        for floor in range(max(floors.values()), 0, -1):
            print(floor, *sorted(room for room in rooms if floors[room] == floor))
        if given.write:
            PICTURE.write_text(svg(rooms))
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
