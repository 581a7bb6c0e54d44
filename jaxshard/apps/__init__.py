"""Applications of jaxshard: the reference trainer, the benchmarks, and their commands."""

IS_A_USER = True  # of `system.users_lines`: its lines are the user's
