"""The processes of a run: start, check who is present, agree. Each must make the same calls."""

from jaxshard.processes.agreement import ProcessError as ProcessError
from jaxshard.processes.agreement import among as among
from jaxshard.processes.agreement import check_same as check_same
from jaxshard.processes.agreement import from_first as from_first
from jaxshard.processes.agreement import gathered as gathered
from jaxshard.processes.agreement import take_leave as take_leave
from jaxshard.processes.agreement import together as together
