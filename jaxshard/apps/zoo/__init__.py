"""The models of the benchmarks: plain functions of plain dicts."""
