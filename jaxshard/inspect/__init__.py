"""Reports a compiled program's collectives, traffic and memory; draws layouts."""

from jaxshard.inspect.placement import picture as picture
from jaxshard.inspect.reports import Report as Report
from jaxshard.inspect.reports import report as report
from jaxshard.inspect.schedule import Schedule as Schedule
from jaxshard.inspect.schedule import schedule as schedule
from jaxshard.inspect.traffic import Collective as Collective
from jaxshard.inspect.traffic import collectives as collectives
from jaxshard.inspect.traffic import wire_bytes as wire_bytes
