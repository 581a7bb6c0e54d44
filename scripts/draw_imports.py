"""Draws which part of jaxshard imports which, and checks it: `python scripts/draw_imports.py [--write]`.

How it counts:

* A room is a folder or a file at the top of `jaxshard/`. A folder is a wing; a folder in it is a wing too.
* An arrow goes from one room to another that any of its modules imports, anywhere in the file: at the top, within a
  function, or for types only. Within a wing the same goes for its files and folders.
* A floor is one above the highest room, or module, that is imported.

The script exits with 1 where a rule is broken: no circle (of modules, of rooms, within a wing), no arrow upwards in
`ORDER`, and the limits below. `--write` writes docs/architecture.svg, and docs/wings/: a drawing of each wing, and a
page of them.
"""

import argparse
import ast
import pathlib
import sys
import textwrap
from collections.abc import Iterator, Mapping
from html import escape

ROOT = pathlib.Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "architecture.svg"
WINGS = ROOT / "docs" / "wings"
MAX_FLOORS, MAX_ARROWS = 12, 120  # of rooms
MAX_FILES, MAX_LEVELS = 12, 2  # in a wing: files in one listing, folders below `jaxshard/`
MAX_FILE_FLOORS, MAX_FILE_ARROWS = 26, 4.23  # of modules; arrows for each

# From the ground up: a room imports only rooms that stand before it.
ORDER = (
    *("system", "base", "hardware", "processes", "mesh", "programs", "platforms", "digest", "guards", "collectives"),
    *("layout", "optimizer", "loss", "step", "strategies", "pipelining", "tensor", "inspect", "aot", "plan"),
    *("checkpoint", "public", "jaxshard", "apps", "cli", "__main__"),
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


def room_of(module: str, wing: str = "jaxshard") -> str:
    """The file or folder of a wing that a module lies in: what follows the wing's name, or its `__init__`.

    >>> room_of("jaxshard.layout.cutting"), room_of("jaxshard"), room_of("jaxshard.layout.cutting", "jaxshard.layout")
    ('layout', 'jaxshard', 'cutting')
    """
    return module.removeprefix(wing).lstrip(".").partition(".")[0] or ("__init__" if "." in wing else wing)


def room_graph(modules: Graph, wing: str = "jaxshard") -> dict[str, set[str]]:
    """What each file and folder of a wing imports of the others."""
    within = [module for module in modules if f"{module}.".startswith(f"{wing}.")]
    rooms: dict[str, set[str]] = {room_of(module, wing): set() for module in within}
    for module in within:
        imported = {room_of(one, wing) for one in modules[module] if f"{one}.".startswith(f"{wing}.")}
        rooms[room_of(module, wing)] |= imported - {room_of(module, wing)}
    return rooms


def wings_of(modules: Graph) -> list[str]:
    """The folders that hold modules, `jaxshard` itself left out."""
    parents = {module.rpartition(".")[0] for module in modules}
    return sorted(parents - {"", "jaxshard"})


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
    floors: dict[str, int] = {}

    def height(node: str) -> int:
        if node not in floors:
            floors[node] = 1 + max((height(below) for below in graph[node]), default=0)
        return floors[node]

    return {node: height(node) for node in graph}


def faults_of(modules: Graph) -> list[str]:
    """What breaks the rules, one sentence each."""
    rooms = room_graph(modules)
    inner = {wing: room_graph(modules, wing) for wing in wings_of(modules)}
    circles = [found for found in map(circle, (modules, rooms, *inner.values())) if found]
    if circles:
        return ["a circle of imports: " + " -> ".join(found) for found in circles]
    faults = [f"{room} is not in ORDER of scripts/draw_imports.py" for room in rooms if room not in ORDER]
    if faults:
        return faults
    for room, imported in rooms.items():
        above = sorted(one for one in imported if ORDER.index(one) > ORDER.index(room))
        faults += [f"an arrow upwards: {room} imports {one}" for one in above]
    faults += _too_many(rooms, MAX_FLOORS, MAX_ARROWS, "of rooms")
    faults += _too_many(modules, MAX_FILE_FLOORS, int(MAX_FILE_ARROWS * len(modules)), "of files")
    for wing in inner:
        num_files = len([module for module in modules if module.rpartition(".")[0] == wing and module not in inner]) + 1
        faults += [f"{wing} has {num_files} files, at most {MAX_FILES}"] if num_files > MAX_FILES else []
        num_levels = wing.count(".")
        faults += [f"{wing} lies {num_levels} levels deep, at most {MAX_LEVELS}"] if num_levels > MAX_LEVELS else []
    return faults


def _too_many(graph: Graph, max_floors: int, max_arrows: int, whose: str) -> list[str]:
    num_floors, num_arrows = max(floors_of(graph).values()), sum(map(len, graph.values()))
    faults = [f"{num_floors} floors {whose}, at most {max_floors}"] if num_floors > max_floors else []
    return faults + ([f"{num_arrows} arrows {whose}, at most {max_arrows}"] if num_arrows > max_arrows else [])


def summary(graph: Graph, noun: str = "rooms") -> str:
    """The picture's figures in words."""
    num_floors, num_arrows = max(floors_of(graph).values()), sum(map(len, graph.values()))
    return f"{len(graph)} {noun}, {num_floors} floors, {num_arrows} arrows"


# The picture: floors from the ground up, each arrow from a room's lower edge to the upper edge of what it imports.

WIDTH, ROW, BOX_WIDTH, BOX_HEIGHT, MARGIN = 1000, 104, 124, 38, 40


def svg(rooms: Graph, wing: str = "jaxshard") -> str:
    """The picture of a wing's files and folders, as text."""
    floors = floors_of(rooms)
    places = _places(floors)
    height = 2 * MARGIN + ROW * (max(floors.values()) - 1) + BOX_HEIGHT
    arrows = [_arrow(places[room], places[one]) for room in sorted(rooms) for one in sorted(rooms[room])]
    boxes = [_box(wing, room, *place) for room, place in sorted(places.items())]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f"<title>Imports between the parts of {wing}: {summary(rooms)}</title>",
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
        here = sorted((room for room in floors if floors[room] == floor), key=_rank)
        for index, room in enumerate(here):
            x = WIDTH * (index + 0.5 + 0.18 * (-1) ** floor) / len(here)  # floors are shifted, so arrows part
            places[room] = (round(x), MARGIN + ROW * (max(floors.values()) - floor))
    return places


def _rank(room: str) -> tuple[int, str]:
    return (ORDER.index(room) if room in ORDER else len(ORDER), room)


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    (x1, y1), (x2, y2) = start, end
    y1 += BOX_HEIGHT
    bend = (y2 - y1) / 2
    curve = f"M{x1:g} {y1:g}C{x1:g} {y1 + bend:g} {x2:g} {y2 - bend:g} {x2:g} {y2 - 2:g}"
    return f'<path d="{curve}" fill="none" stroke="#607080" stroke-opacity="0.55" marker-end="url(#tip)"/>'


def _box(wing: str, room: str, x: float, y: float) -> str:
    is_folder = (ROOT / wing.replace(".", "/") / room).is_dir() and room != wing
    name = "__init__" if room == wing else room + ("/" if is_folder else ".py")
    fill = "#dcebf7" if is_folder else "#fdf3d8"
    return (
        f'<rect x="{x - BOX_WIDTH / 2:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" fill="{fill}" '
        f'stroke="#34495e"/><text x="{x:g}" y="{y + 25:g}" text-anchor="middle" font-size="14">{escape(name)}</text>'
    )


def pictures(modules: Graph) -> dict[pathlib.Path, str]:
    """Each picture's file and text: the house, and each wing that has arrows within it; and the page of the wings."""
    inner = {wing: room_graph(modules, wing) for wing in wings_of(modules)}
    drawn = {
        WINGS / f"{wing.partition('.')[2]}.svg": svg(graph, wing)
        for wing, graph in inner.items()
        if any(graph.values())
    }
    return {PICTURE: svg(room_graph(modules)), **drawn, WINGS / "index.md": page_of([*drawn])}


def page_of(drawings: list[pathlib.Path]) -> str:
    """The page that shows the wings' pictures, each below the sentence with which its `__init__` begins."""
    parts = ["# Imports within each wing", "`python scripts/draw_imports.py --write` writes it."]
    for path in sorted(drawings):
        wing = path.stem.replace(".", "/")
        says = ast.get_docstring(ast.parse((ROOT / "jaxshard" / wing / "__init__.py").read_text())) or ""
        parts += [f"## `{wing}/`", textwrap.fill(" ".join(says.partition("\n\n")[0].split()), 120)]
        parts.append(f"![Imports within {wing}]({path.name})")
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Prints the figures and the faults; returns 1 if there is any fault."""
    parser = argparse.ArgumentParser(description="Checks the imports between the parts of jaxshard, and draws them.")
    parser.add_argument("--write", action="store_true", help=f"write {PICTURE.relative_to(ROOT)} and docs/wings/")
    given = parser.parse_args()
    modules = module_graph(ROOT / "jaxshard")
    faults = faults_of(modules)
    rooms = room_graph(modules)
    if not circle(modules) and not circle(rooms):
        print(f"{summary(rooms)}; {summary(modules, 'files')}")
        floors = floors_of(rooms)
        for floor in range(max(floors.values()), 0, -1):
            print(floor, *sorted(room for room in rooms if floors[room] == floor))
        if given.write:
            WINGS.mkdir(exist_ok=True)
            for old in WINGS.iterdir():
                old.unlink()
            for path, text in pictures(modules).items():
                path.write_text(text)
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
