"""What others' code is written against: names, parameters with their defaults, import paths. See docs/stability.md.

A change that is meant is written down by `python tests/test_public_api.py > tests/public_api.txt`, and in CHANGELOG.md.
"""

import functools
import importlib
import inspect
import pathlib
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from types import ModuleType

import pytest

import jaxshard

RECORD = pathlib.Path(__file__).parent / "public_api.txt"
MODULES = (
    "aot",
    "checkpoint",
    "digest",
    "guards",
    "inspect",
    "layout",
    "mesh",
    "pipelining",
    "plan",
    "processes",
    "tensor",
)


def lines() -> Iterator[str]:
    """Every public name of the package and of its public modules, one line each."""
    for path, thing in public_things():
        yield from described(path, thing)


def public_things() -> Iterator[tuple[str, object]]:
    """(Path, thing) of every public name."""
    for name in sorted(jaxshard.__all__):
        yield f"jaxshard.{name}", getattr(jaxshard, name)
    for module in MODULES:
        found = importlib.import_module(f"jaxshard.{module}")
        for name in names_of(found):
            yield f"jaxshard.{module}.{name}", getattr(found, name)


def names_of(module: ModuleType) -> list[str]:
    """What a module says is public; a face, all that it imports by name."""
    given = [name for name, thing in vars(module).items() if name[0] != "_" and not inspect.ismodule(thing)]
    return sorted(getattr(module, "__all__", given))


def described(path: str, thing: object) -> Iterator[str]:
    yield path + parameters(thing)
    if inspect.isclass(thing):
        for name, member in sorted(vars(thing).items()):
            if not name.startswith("_") and (callable(member) or isinstance(member, property | classmethod)):
                yield f"{path}.{name}" + parameters(getattr(member, "__func__", member))


def parameters(thing: object) -> str:
    """Names, kinds and defaults; annotations are for type checkers, and print otherwise in each Python."""
    if not inspect.isroutine(thing) and not inspect.isclass(thing):
        return ""
    try:
        found = inspect.signature(thing).parameters.values()
    except ValueError:
        return ""
    bare = [p.replace(annotation=p.empty) for p in found]
    return re.sub(r"<.* at 0x\w+>", "...", str(inspect.Signature(bare)))


def test_names_parameters_and_paths_are_as_recorded():
    assert list(lines()) == RECORD.read_text().splitlines()


def test_only_public_names_are_listed():
    assert dir(jaxshard) == sorted([*jaxshard.__all__, *MODULES, "__version__"])


def test_what_a_public_name_gives_or_takes_is_public():
    """No annotation of a public function, method, property or field names a class of ours that is not."""
    public = dict(public_things())
    known = {id(thing) for thing in public.values()}
    hidden = {
        f"{path}: {kind.__module__}.{kind.__name__}"
        for path, thing in public.items()
        for hint in hints_of(thing)
        for kind in classes_in(hint)
        if kind.__module__.startswith("jaxshard") and id(kind) not in known
    }
    assert not hidden


def test_a_hidden_class_is_found():
    class Hidden:
        __module__ = "jaxshard.somewhere"

    class Face:
        __module__ = "jaxshard.somewhere"
        field: dict[str, tuple[Hidden, ...]]

        @functools.cached_property
        def cached(self):
            return None

    Face.cached.func.__module__ = "jaxshard.somewhere"
    Face.cached.func.__annotations__["return"] = Hidden | None
    assert [Hidden in set(classes_in(hint)) for hint in hints_of(Face)] == [True, True]


def hints_of(thing: object) -> Iterator[object]:
    """The annotations of a function; of a class, of its fields, and of the methods and properties that users call."""
    members = [thing]
    if inspect.isclass(thing) and not typing.get_origin(thing):
        yield from typing.get_type_hints(thing).values()
        members = [m for name, m in inspect.getmembers_static(thing) if name[0] != "_" or name == "__call__"]
    for member in members:
        function = next((f for f in (getattr(member, n, None) for n in ("fget", "func", "__func__")) if f), member)
        if inspect.isfunction(function) and function.__module__.startswith("jaxshard"):
            yield from typing.get_type_hints(function).values()


def classes_in(hint: object) -> Iterator[type]:
    """The classes that an annotation names; of keyword arguments (`Unpack`) the options' types, not their table."""
    if inspect.isclass(hint):
        yield hint
    if typing.get_origin(hint) is typing.Unpack:
        (table,) = typing.get_args(hint)
        hint = tuple[*typing.get_type_hints(table).values()] if typing.is_typeddict(table) else table
    for inner in typing.get_args(hint):
        for one in inner if isinstance(inner, list) else [inner]:
            yield from classes_in(one)


def test_public_modules_come_when_asked_for():
    """Whatever was imported before: asked in a process of its own."""
    code = "import sys, jaxshard\n"
    code += "".join(f"assert jaxshard.{name}.__name__ == 'jaxshard.{name}'\n" for name in MODULES)
    code += "assert callable(jaxshard.pipeline), jaxshard.pipeline\n"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_name_that_was_replaced_before_the_first_use_stays_so():
    code = (
        "import jaxshard; jaxshard.zero2 = 3; jaxshard.ddp; assert jaxshard.zero2 == 3; assert callable(jaxshard.zero3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_jaxshard_imports_no_module_that_few_need():
    wings = {name.split(".")[1] for name in imported_by("import jaxshard; jaxshard.train_step") if "jaxshard." in name}
    assert {"public", "step"} <= wings
    assert not wings & {"aot", "checkpoint", "guards", "inspect", "plan", "tensor", "apps", "cli", "hardware"}


@pytest.mark.parametrize("code", ["import jaxshard", "import jaxshard.cli; jaxshard.cli.main(['--help'])"])
def test_jax_is_not_imported_before_it_is_used(code):
    """It takes seconds, and `jaxshard --help` needs none of it."""
    modules = imported_by(code)
    assert "jaxshard.system.command" in modules
    assert not modules & {"jax", "numpy", "optax", "jaxshard.public"}


def imported_by(code):
    """The names of all modules that a process of its own has imported after `code`."""
    code = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


WITHOUT_EXTRAS = """
import sys
sys.modules.update(dict.fromkeys(("flax", "orbax", "filelock", "rich", "tyro", "cattrs", "matplotlib", "safetensors")))
import jax
jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp, optax, jaxshard
opt = jaxshard.zero2(optax.adamw(1e-3), jaxshard.make_mesh(), min_shard_size=1)
params = opt.place({"w": jnp.ones((4, 4))})
step = jaxshard.train_step(lambda params, x: jnp.mean(x @ params["w"]), opt, donate=False)
arguments = params, opt.init(params), jnp.ones((2, 4))
step(*arguments)
print(jaxshard.inspect.report(step.lower(*arguments).compile()), opt.layout(params))
print(jaxshard.plan.predict(step, *arguments[::2]), jaxshard.tensor, jaxshard.aot, jaxshard.guards, jaxshard.digest)
try:
    jaxshard.checkpoint
except ModuleNotFoundError as error:
    print(error)
"""


def test_all_but_checkpoints_works_without_any_extra():
    """On jax, optax and numpy alone; checkpoints say what to install."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", WITHOUT_EXTRAS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 'install it with: pip install "jaxshard[checkpoint]"' in done.stdout.splitlines()[-1]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="zero4"):
        _ = jaxshard.zero4


def test_every_public_name_has_a_docstring():
    paths = [line.split("(")[0] for line in lines()]
    things = {path: thing_at(path) for path in paths}
    told = {path for path, thing in things.items() if not callable(thing) and not isinstance(thing, property)}
    told |= {"jaxshard.plan.Build", "jaxshard.pipelining.Schedule"}  # aliases: the reference tells
    assert [path for path in paths if path not in told and not (things[path].__doc__ or "").strip()] == []


def thing_at(path: str) -> object:
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise AssertionError(path)


if __name__ == "__main__":
    print(*lines(), sep="\n")
