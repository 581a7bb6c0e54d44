"""The models of the benchmarks: plain functions of plain dicts, each file by itself."""
