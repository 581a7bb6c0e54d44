"""A pytest plugin: runs optax's own tests with its optimizers sharded over 8 devices by the strategy STRATEGY."""

import functools
import os
import sys
import types

import jax
import optax

import jaxshard

RECOMPILES = "Optimizer recompiles on second call"

counts = {"wrapped": 0, "passed": 0, "recompiles": 0}


def pytest_configure():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    try:
        import sklearn  # noqa: F401
    except ModuleNotFoundError:  # two of optax's tests of L-BFGS use its data
        absent = types.ModuleType("sklearn")
        absent.datasets = absent.linear_model = None  # pyright: ignore[reportAttributeAccessIssue]
        sys.modules["sklearn"] = absent


def pytest_collection_modifyitems(items):
    for module in {id(item.module): item.module for item in items}.values():
        if hasattr(module, "_get_opt"):  # optax._src.alias_test
            module._get_opt = functools.partial(lambda real, test, name: _sharding(real(test, name)), module._get_opt)
        else:  # optax.contrib._common_test
            module._get_opt_factory = functools.partial(
                lambda real, name: _sharding(real(name)), module._get_opt_factory
            )


def _sharding(make):
    """Wraps an optimizer's factory to make a sharded one."""

    @functools.wraps(make)
    def sharded(*args, **options):
        made = make(*args, **options)
        if not isinstance(made, optax.GradientTransformation):
            return made
        counts["wrapped"] += 1
        name = os.environ["STRATEGY"]
        mesh = jaxshard.make_mesh(data=4, replica=2) if name == "hsdp" else jaxshard.make_mesh()
        return getattr(jaxshard, name)(made, mesh, min_shard_size=2)

    return sharded


def pytest_runtest_logreport(report):
    if report.when == "call" and report.passed:
        counts["passed"] += 1
    elif report.failed and RECOMPILES in getattr(getattr(report.longrepr, "reprcrash", None), "message", ""):
        counts["recompiles"] += 1


def pytest_terminal_summary(terminalreporter):
    failed = len(terminalreporter.stats.get("failed", [])) + len(terminalreporter.stats.get("error", []))
    other = failed - counts["recompiles"]
    print(
        f"\nSUITE wrapped={counts['wrapped']} passed={counts['passed']} recompiles={counts['recompiles']} other={other}"
    )
