"""Pipeline parallelism: the timetable of a schedule, and its execution. `jaxshard.pipeline` is the function."""
