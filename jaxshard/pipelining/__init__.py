"""Pipeline parallelism: which stage works on which microbatch at which tick. `jaxshard.pipeline` is the function."""

from jaxshard.pipelining.timetable import Cell as Cell
from jaxshard.pipelining.timetable import Info as Info
from jaxshard.pipelining.timetable import Plan as Plan
from jaxshard.pipelining.timetable import Schedule as Schedule
from jaxshard.pipelining.timetable import Work as Work
from jaxshard.pipelining.timetable import cells as cells
from jaxshard.pipelining.timetable import chart as chart
from jaxshard.pipelining.timetable import draw as draw
