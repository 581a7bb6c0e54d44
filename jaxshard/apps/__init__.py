"""Applications of jaxshard: the reference trainer, the benchmarks, and their commands."""
