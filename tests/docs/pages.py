"""Runs one page's Python blocks, in order and in one namespace, by sybil: `python -W error pages.py PAGE.md`.

Each page runs in its own process, since its first block may choose the number of simulated devices; `WITHOUT_DEVICES`
do not. `AFTER` asserts the page's promises.
"""

import io
import os
import pathlib
import signal
import sys
from contextlib import redirect_stdout

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

ROOT = pathlib.Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "_build" not in path.parts
}
RECIPES = {"docs/recipes.md", "docs/recipes_algorithms.md"}  # pages on which each section begins with the first block


def blocks_of(path):
    """The Python blocks of a page, found by sybil; they share a namespace."""
    return list(Sybil(parsers=[PythonCodeBlockParser()]).parse(path).examples())


def run(block):
    """Evaluates a block; returns what it printed."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        block.evaluate()
    return printed.getvalue()


def simulate():
    import jax

    jax.config.update("jax_num_cpu_devices", 8)


def readme(blocks, names):
    """The program has at most ten lines, learns on 8 devices, and prints the layout."""
    del names
    (ten_lines,) = blocks
    assert len([line for line in ten_lines.parsed.splitlines() if line.strip()]) <= 10
    printed = run(ten_lines)
    loss = float(printed.splitlines()[0])
    assert loss < 0.5, loss
    assert "w1" in printed
    assert "P('data',)" in printed


def front_page(blocks, names):
    """The README's ten lines."""
    del names
    (ten_lines,) = blocks
    assert ten_lines.parsed == blocks_of(PAGES["README.md"])[0].parsed
    assert float(run(ten_lines).splitlines()[0]) < 0.5


def survive(blocks, names):
    """SIGTERM in step 250 makes the run save it; started again, it resumes there and runs to the end."""
    training, kept_run, copies = blocks
    run(training)
    next_batch = names["next_batch"]

    def batch_and_signal(i):
        if i == 249:
            os.kill(os.getpid(), signal.SIGTERM)
        return next_batch(i)

    names["next_batch"] = batch_and_signal
    run(kept_run)
    assert names["i"] == 250, names["i"]
    run(training)
    run(kept_run)
    assert names["i"] == 1000, names["i"]
    run(copies)


def parallelism(blocks, names):
    hybrid, context = map(float, map(run, blocks))
    assert hybrid < 0.1, hybrid
    assert context < 4, context  # of 4.16, ln 64


def plan(blocks, names):
    printed = "".join(map(run, blocks))
    assert [line.split()[0] for line in printed.splitlines()[:5]] == ["ddp", "zero1", "zero2", "zero3", "hsdp"]
    assert "is the fastest that fits" in printed


def checkpoints(blocks, names):
    for block in blocks:
        run(block)
    assert names["step"] == names["tree"]["step"] == 700
    assert names["tree"]["params"]["w"].sharding == names["params"]["w"].sharding


def multihost(blocks, names):
    for block in blocks:
        run(block)
    assert names["mesh"].size == 8
    assert names["weights"]["w"].sharding == names["rollout"]


def memory(blocks, names):
    for block in blocks:
        run(block)
    base = names["placed"]["base"]["w"]
    assert base.dtype == "int8"
    assert base.addressable_shards[0].data.size == base.size // 8


def doctor(blocks, names):
    for block in blocks:
        run(block)
    step, params, batch = names["build"]()
    assert "gathered at unshard" in str(step.layout(params, batch))
    own, *arguments = names["build_own"]()
    assert "all-reduce" in own.lower(*arguments).compile().as_text()


def choosing(blocks, names):
    """The page has the table of bytes per parameter that its block prints."""
    printed = "".join(map(run, blocks)).splitlines()
    assert len(printed) == 4
    page = PAGES["docs/choosing.md"].read_text().splitlines()
    assert all(line in page for line in printed), printed


def jit_and_named_sharding(blocks, names):
    """The page shows the compiled program's bytes for jaxshard; the version by hand moves at least as many."""
    by_hand, ours = "".join(map(run, blocks)).splitlines()
    assert ours in PAGES["docs/coming_from/jit_and_named_sharding.md"].read_text(), ours
    sent = [[float(word) for word in line.split() if "." in word] for line in (by_hand, ours)]
    assert len(sent[0]) == len(sent[1]) == 4
    assert all(theirs >= mine for theirs, mine in zip(*sent, strict=True)), sent


def other(blocks, names):
    """A page that promises only that its blocks run."""
    for block in blocks:
        run(block)


WITHOUT_DEVICES = {
    "README.md",
    "docs/index.md",
    "docs/checkpoints.md",
    "docs/survive.md",
    "docs/multihost.md",
    "docs/doctor.md",
}
AFTER = {
    "README.md": readme,
    "docs/index.md": front_page,
    "docs/parallelism.md": parallelism,
    "docs/plan.md": plan,
    "docs/checkpoints.md": checkpoints,
    "docs/multihost.md": multihost,
    "docs/memory.md": memory,
    "docs/doctor.md": doctor,
    "docs/survive.md": survive,
    "docs/choosing.md": choosing,
    "docs/coming_from/jit_and_named_sharding.md": jit_and_named_sharding,
}

if __name__ == "__main__":
    (name,) = sys.argv[1:]
    found = blocks_of(PAGES[name])
    assert found, f"{name} has no Python block"
    space = found[0].namespace
    if name in WITHOUT_DEVICES:
        simulate()
    AFTER.get(name, other)(found, space)
