"""Each recipe in the docs, with the lines of one device and with those that change: the same params after ten steps."""

import pathlib
import re

import jax
import numpy as np
import one_device
import pytest

DOCS = pathlib.Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
BEGIN, RECIPES, MORE = {}, {}, {}  # by title: the page's first block, the recipe, and the blocks after it
for page in ("recipes.md", "recipes_algorithms.md"):
    text = (DOCS / page).read_text()
    for title, section in re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", text, re.M):
        RECIPES[title], *MORE[title] = BLOCK.findall(section)
        BEGIN[title] = BLOCK.search(text)[1]
RESULTS = {
    "flax.nnx, with nnx.Optimizer": "nnx.state(model), nnx.state(optimizer)",
    "flax.nnx, with BatchNorm, experts and train_step": "params, state, nnx.filter_state(rest, nnx.BatchStat)",
    "flax.linen, with TrainState": "train_state.params, train_state.opt_state, train_state.step",
    "equinox": "eqx.filter(model, eqx.is_array), state",
    "flax.linen, with BatchNorm, TrainState and train_step": "params, state, stats",
    "equinox, with BatchNorm and train_step": "params, state, norms",
    "haiku": "params, state, norms",
    "Several networks: GAN, actor and critic": "generator, discriminator, states",
    "DQN with a target network, or an average of the params": "params, state, target, average",
    "DCGAN with BatchNorm, in equinox": "g, d, g_state, d_state, g_norms, d_norms",
}


def for_one_device(code):
    """The recipe with the lines that it gives for one device."""
    lines = [line for line in code.splitlines() if not line.endswith("# new")]
    code = re.sub(r"^( *)# was: (.*)\n.*", r"\1\2", "\n".join(lines), flags=re.M)
    return re.sub(r"^( *).*  # was: (.*)$", r"\1\2", code, flags=re.M)


def results_of(title, *blocks):
    space = {"one_device": one_device}
    for code in (BEGIN[title], *blocks):
        exec(compile(code, title, "exec"), space)
    found = jax.tree.leaves(eval(RESULTS.get(title, "params, state"), space))
    return [
        np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in found
    ]


@pytest.mark.parametrize("title", RECIPES)
def test_recipe(title):
    compare(title, ["zero2", "zero3"])


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
@pytest.mark.parametrize("title", RECIPES)
def test_recipe_under(title, strategy):
    compare(title, [strategy])


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("title", [title for title, blocks in MORE.items() if blocks])
def test_the_blocks_after_a_recipe_run(title, strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results_of(title, RECIPES[title].replace("jaxshard.zero2", f"jaxshard.{strategy}"), *MORE[title])


WITH_MASKS = [title for title, code in RECIPES.items() if "Dropout(" in code and "jaxshard.train_step(" in code]


def without_masks(title):
    """The recipe; without its dropout if `train_step`, which draws other masks than one device, takes the steps."""
    code = RECIPES[title]
    return code.replace("Dropout(0.1", "Dropout(0.0") if title in WITH_MASKS else code


@pytest.mark.parametrize("title", WITH_MASKS)
def test_masks_of_a_recipe_have_an_effect(title):
    """It runs as it stands, and its dropout is not without effect."""
    with_masks, without = (results_of(title, code) for code in (RECIPES[title], without_masks(title)))
    assert all(np.isfinite(leaf.astype("f8")).all() for leaf in with_masks)
    assert not all(np.allclose(one, other, rtol=1e-2) for one, other in zip(with_masks, without, strict=True))


def compare(title, strategies):
    code = without_masks(title)
    plain = for_one_device(code)
    assert "jaxshard" not in plain
    assert code.count("# was:") + code.count("# new") <= 6
    want = results_of(title, plain)
    for strategy in strategies:
        got = results_of(title, code.replace("jaxshard.zero2", f"jaxshard.{strategy}"))
        assert len(got) == len(want)
        for one, other in zip(want, got, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5, err_msg=f"{title}, {strategy}")


def test_every_result_is_a_recipe():
    assert set(RESULTS) <= set(RECIPES)
