"""docs/parity.md: each feature that it lists has a test, named here."""

import ast

from pages import ROOT

TESTS = {
    "Wrap another optimizer": ["optimizer/test_optimizer.py::test_it_is_a_gradient_transformation"],
    "Use inside other wrappers": ["optimizer/test_optimizer.py::test_inside_other_transformations"],
    "Inner optimizer": ["optimizer/test_optimizer.py::test_equality_is_by_value"],
    "`rank`, `world_size`": ["optimizer/test_optimizer.py::test_world_size_and_rank"],
    "Start several processes": ["processes/test_start.py::test_two_processes_train_as_one"],
    "Configuration object": [
        "layout/test_options.py::test_what_is_given_arrives",
        "apps/test_config.py::test_command_line_over_file_over_defaults",
    ],
    "Default options, errors for wrong ones": ["layout/test_options.py::test_an_unknown_option_names_the_nearest"],
    "Process grid with inferred sizes (-1)": ["test_mesh.py::test_sizes"],
    "Data, tensor and pipeline parallelism together": ["pipelining/test_pipeline.py"],
    "`step()`: update the parameters": ["step/test_strategies.py::test_equals_one_device_in_double_precision"],
    "`zero_grad()`, gradient accumulation": ["step/test_strategies.py::test_microbatches_equal_the_whole_batch"],
    "Synchronize replicas": ["optimizer/test_optimizer.py::test_synchronize_makes_copies_equal_bit_for_bit"],
    "Compare replicas": ["test_digest.py::test_a_replica_that_differs_is_found_and_named"],
    "Serialize, deserialize": ["checkpoint/test_checkpointer.py::test_bytes_of_all_kinds_and_strategies"],
    "Save; load under another strategy or size": [
        "checkpoint/test_checkpointer.py::test_every_strategy_restores_under_every_other"
    ],
    "Keep the last, the best": ["checkpoint/test_checkpointer.py::test_what_is_kept"],
    "Training loop": ["apps/test_train.py::test_training_equals_one_device"],
    "Early stopping": ["apps/test_train.py::test_run_stops_early_and_remembers_it"],
    "Mixed precision, loss scaling": ["optimizer/test_optimizer.py::test_masters"],
    "Errors for invalid arguments": ["step/test_errors.py"],
}


def test_every_feature_has_a_test():
    rows = [line for line in (ROOT / "docs" / "parity.md").read_text().splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[1:]] == list(TESTS)


def test_the_tests_exist():
    for test in (test for tests in TESTS.values() for test in tests):
        file, _, name = test.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text())
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert not name or name in names, test
