"""jaxshard: shard any optax optimizer over a JAX device mesh, with the same training result."""

from jaxshard.core.gradients import evaluate as evaluate
from jaxshard.core.gradients import value_and_grad as value_and_grad
from jaxshard.core.optimizer import ShardedOptimizer as ShardedOptimizer
from jaxshard.core.optimizer import ddp as ddp
from jaxshard.core.optimizer import fsdp as fsdp
from jaxshard.core.optimizer import hsdp as hsdp
from jaxshard.core.optimizer import hybrid as hybrid
from jaxshard.core.optimizer import pipeline_parallel as pipeline_parallel
from jaxshard.core.optimizer import shard_batch as shard_batch
from jaxshard.core.optimizer import specs_of as specs_of
from jaxshard.core.optimizer import tensor_parallel as tensor_parallel
from jaxshard.core.optimizer import zero1 as zero1
from jaxshard.core.optimizer import zero2 as zero2
from jaxshard.core.optimizer import zero3 as zero3
from jaxshard.core.precision import LossScale as LossScale
from jaxshard.core.precision import ShardedState as ShardedState
from jaxshard.core.step import NonFiniteError as NonFiniteError
from jaxshard.core.step import train_step as train_step
from jaxshard.core.unshard import unshard as unshard
from jaxshard.mesh import make_mesh as make_mesh
from jaxshard.pipelining.pipeline import pipeline as pipeline
from jaxshard.processes.start import initialize as initialize

__version__ = "0.1.0"
