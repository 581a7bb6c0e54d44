"""Building blocks for a loss function: layers whose weights are sharded over a mesh axis, attention over cut sequences.

Weights come as this device's shards, by the optimizer's `specs`. Activations between the blocks are replicated over the
axis (Shoeybi et al. 2020, Megatron-LM, section 3), or with `sequence=dim` sharded along that dim, so that norms and
residuals take 1/T of the memory (Korthikanti et al. 2022, section 4.2.2); the wire bytes are the same.

Gradients need no sums by hand: JAX's types determine which are needed, and autodiff makes each once. Outside of
`shard_map`, or if the mesh has no such axis, every block is the plain operation, so that one model serves every
strategy.

For sequences that an axis of the batch cuts (context parallelism), `ring_attention` and `gathered_attention` let the
positions of one device attend to those of all.

Shapes: T devices on the axis, D features, F features in T shards, V the vocabulary.
"""

from jaxshard.tensor.attention import gathered_attention as gathered_attention
from jaxshard.tensor.attention import positions as positions
from jaxshard.tensor.attention import ring_attention as ring_attention
from jaxshard.tensor.attention import zigzag as zigzag
from jaxshard.tensor.blocks import axis_size as axis_size
from jaxshard.tensor.blocks import column_parallel as column_parallel
from jaxshard.tensor.blocks import expert_parallel as expert_parallel
from jaxshard.tensor.blocks import join_sequence as join_sequence
from jaxshard.tensor.blocks import per_device as per_device
from jaxshard.tensor.blocks import row_parallel as row_parallel
from jaxshard.tensor.blocks import split_sequence as split_sequence
from jaxshard.tensor.blocks import sum_shards as sum_shards
from jaxshard.tensor.vocabulary import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
from jaxshard.tensor.vocabulary import vocab_parallel_embedding as vocab_parallel_embedding
from jaxshard.tensor.vocabulary import vocab_parallel_linear_cross_entropy as vocab_parallel_linear_cross_entropy
