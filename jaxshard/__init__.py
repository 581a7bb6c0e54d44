"""jaxshard: shard any optax optimizer over a JAX device mesh, with the same training result."""

from jaxshard.gradients import evaluate as evaluate
from jaxshard.gradients import value_and_grad as value_and_grad
from jaxshard.lazy import unshard as unshard
from jaxshard.mesh import initialize as initialize
from jaxshard.mesh import make_mesh as make_mesh
from jaxshard.optimizer import ShardedOptimizer as ShardedOptimizer
from jaxshard.optimizer import ddp as ddp
from jaxshard.optimizer import fsdp as fsdp
from jaxshard.optimizer import hsdp as hsdp
from jaxshard.optimizer import hybrid as hybrid
from jaxshard.optimizer import pipeline_parallel as pipeline_parallel
from jaxshard.optimizer import shard_batch as shard_batch
from jaxshard.optimizer import specs_of as specs_of
from jaxshard.optimizer import tensor_parallel as tensor_parallel
from jaxshard.optimizer import zero1 as zero1
from jaxshard.optimizer import zero2 as zero2
from jaxshard.optimizer import zero3 as zero3
from jaxshard.pipeline import pipeline as pipeline
from jaxshard.precision import LossScale as LossScale
from jaxshard.precision import ShardedState as ShardedState
from jaxshard.step import NonFiniteError as NonFiniteError
from jaxshard.step import train_step as train_step

__version__ = "0.1.0"
