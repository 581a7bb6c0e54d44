"""The configuration of a training run: frozen sections, read from TOML and the command line.

The text under each field is its help text.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The text."""

    path: Annotated[str | None, tyro.conf.arg(aliases=["--data"], metavar="PATH")] = None
    """A file or folder of text (read as bytes) or of tokens; stdlib: the source of Python's standard library, 8 MB;
    MODULE:FUNCTION or FILE.py:FUNCTION: a function that returns a grain.MapDataset of rows of tokens; by default a
    0.5 MB English text that comes with Python (pydoc's help topics)."""
    format: Literal["auto", "bytes", "uint16", "uint32"] = "auto"
    """bytes: text; uint16, uint32: tokens as nanoGPT and llm.c write them, not loaded into memory; auto: tokens if all
    files end in .bin, uint16 unless llm.c's header says uint32."""
    heldout: float = 0.1
    """The last part of the text, held out from training for evaluation."""
    heldout_path: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """A file or folder (or function, as for path) for evaluation, instead of the last part. In a folder of tokens, the
    files with val in their names are held out by default."""
    heldout_bytes: int = 2**18
    """Maximum number of held-out bytes or tokens per evaluation."""


SLOW_TURNS, FAST_TURNS = 1.0, 4.0  # in `rotary_length` positions; frequencies between are divided by less


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The byte-level decoder-only transformer."""

    layers: int = 3
    """Number of blocks."""
    width: int = 192
    """Features of each position."""
    heads: int = 6
    """Attention heads; they share the width."""
    kv_heads: int = 0
    """Heads of keys and values, each shared by heads / kv_heads query heads; 0: as many as heads."""
    hidden: int = 512
    """Hidden features of each MLP."""
    sequence_length: int = 128
    """Context length, in bytes or tokens."""
    vocabulary: int = 256
    """Number of token ids, 256 for bytes; with bytes, more only makes the model as large as one with a tokenizer."""
    positions: Literal["rotary", "learned"] = "rotary"
    """rotary: rotates queries and keys by position; learned: a learned vector for each position."""
    rotary_base: float = 10_000.0
    """RoPE base (theta); Llama 3 uses 500000."""
    rotary_factor: float = 1.0
    """RoPE scaling of Llama 3.1 (which uses 8): divides frequencies of less than one period in rotary_length positions
    by this, those of one to four periods by less, and leaves higher ones unchanged."""
    rotary_length: int = 8192
    """Context length before RoPE scaling."""
    norm: Literal["rms", "layer"] = "rms"
    """Norm before attention, MLP and output. rms: RMSNorm; layer: LayerNorm, which subtracts the mean."""
    norm_epsilon: float = 1e-6
    """Epsilon of the norms; GPT-2 uses 1e-5."""
    bias: bool = False
    """Use biases in the blocks' matrices and in layer norms, as GPT-2 does."""
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    """The MLP's non-linearity, gated (swiglu) or plain (gelu)."""
    tied: bool = False
    """Use the embedding as the output layer too."""
    dropout: float = 0.0
    """Dropout rate of each block's output."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the computation; see [precision] for parameters, gradients and state."""
    remat: bool = True
    """Recompute each block in the backward pass instead of keeping its activations."""
    attention: Literal["auto", "fused", "xla"] = "auto"
    """auto: a fused kernel (cuDNN's on GPU, Pallas's splash on TPU) if available, else plain operations; fused: a
    kernel, or an error; xla: plain operations, which store the full matrix of attention weights."""
    loss_chunk: int = -1
    """Positions of each row whose logits are in memory at once, a divisor of sequence_length; the backward pass
    recomputes them. 0: all; -1: as many as take 512 MB in float32."""


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Trains low-rank adapters of a trained model's frozen matrices, instead of all of its parameters."""

    rank: int = 0
    """Rank of the adapters of the blocks' matrices; only these are trained, and train.start gives the model. 0: no
    adapters; everything is trained."""
    alpha: float = 16.0
    """Adapters' outputs are multiplied by alpha / rank."""
    base: Literal["", "float32", "bfloat16", "int8"] = ""
    """Type of the frozen parameters, by default precision.params; int8: the blocks' matrices in 8 bits with a scale per
    output, everything else in bfloat16."""

    @property
    def factor(self) -> float:
        """The factor of the adapters' outputs."""
        return self.alpha / self.rank if self.rank else 0.0

    def float_base(self, dtype: str) -> str:
        """The type of frozen floats, if trained parameters have `dtype`."""
        return {"": dtype, "int8": "bfloat16"}.get(self.base, self.base)


NO_LORA = LoraConfig()
"""All parameters are trained."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, or another of optax's, with warm-up and cosine decay of the learning rate."""

    name: str = "adamw"
    """Any optimizer of optax or optax.contrib that has a learning rate: lion, muon, adafactor, sgd and more. muon
    updates the blocks' matrices, with AdamW for the rest."""
    arguments: str = ""
    """Further arguments of the optimizer, as TOML: b1 = 0.9, nesterov = true."""
    learning_rate: float = 3e-3
    """Highest learning rate, reached after the warm-up."""
    warmup_steps: int = 50
    """Steps in which the learning rate rises from zero to its maximum."""
    final_fraction: float = 0.05
    """Learning rate at the last step, as a fraction of the highest."""
    beta1: float | None = None
    """b1, decay of the mean of gradients; by default optax's, 0.9 for AdamW."""
    beta2: float | None = None
    """b2, decay of the mean of squared gradients; by default 0.98 for AdamW, and optax's default for other
    optimizers."""
    weight_decay: float | None = None
    """Weight decay of the matrices, by default 0.1 for optimizers that support it, not of norms and embeddings."""
    clip_norm: float = 1.0
    """Maximum global norm of the gradients, which are scaled down to it."""


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    """Types in memory and in communication; model.dtype is that of the computation."""

    params: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the parameters and their gradients."""
    masters: bool = False
    """Keep float32 masters in the state, and round narrower parameters from them."""
    moments: Literal["float32", "bfloat16", "int8"] = "float32"
    """Storage type of AdamW's moments, which computes in float32. bfloat16: rounded stochastically; int8: 8-bit codes,
    also rounded stochastically, with a scale per block of 128; small leaves and tables stay float32."""
    reduce: Literal["", "float32", "bfloat16", "float16"] = ""
    """Type of gradient sums over microbatches and devices; by default the parameters'."""
    stochastic_rounding: bool = False
    """Update bfloat16 parameters in float32 and round them stochastically, as a substitute for masters."""
    loss_scale: bool = False
    """Scale the loss so that float16 gradients neither vanish nor overflow; the scale adjusts automatically."""


@dataclasses.dataclass(frozen=True)
class ShardingConfig:
    """Strategy, mesh and sharding."""

    strategy: Literal[
        "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "tensor_parallel", "pipeline_parallel", "hybrid"
    ] = "zero2"
    """ddp shards nothing, zero1 the state, zero2 also gradients, zero3 (= fsdp) also parameters, hsdp all of these
    within each replica, tensor_parallel single layers, pipeline_parallel the stack of layers; hybrid combines these."""
    devices: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Devices to use, by default all. Without an accelerator CPU devices are simulated, by default 8."""
    data: int = -1
    """Size of the mesh axis to shard over; -1: all remaining devices."""
    replica: int = 1
    """Size of the mesh axis to replicate shards over (for hsdp at least 2)."""
    state_over: Literal["data", "data+replica"] = "data"
    """Mesh axes to shard the optimizer's state over, if the strategy shards it. With hsdp, data+replica shards the
    state over all devices, and parameters within each replica."""
    state_memory: str = "device"
    """Where to keep the optimizer's state. device; host: streamed through the devices in each update; host:0.5: this
    fraction of its bytes on the host."""
    regather: Literal["use", "step", "backward"] = "use"
    """When to gather sharded parameters. use: where the loss uses them, and where it recomputes that; backward: for the
    backward pass again, recomputed or not; step: once per step, with less traffic and more memory."""
    tensor: int = 1
    """Size of the mesh axis to shard each layer over (tensor_parallel, hybrid)."""
    pipeline: int = 1
    """Size of the mesh axis to distribute stages of layers over (pipeline_parallel, hybrid)."""
    zero: int = 2
    """What hybrid shards over data: 0 nothing, 1 state, 2 also gradients, 3 also parameters."""
    sequence_parallel: bool = False
    """Shard activations between the layers along the sequence, over the tensor axis."""
    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    """The pipeline's schedule: the order in which stages process microbatches."""
    virtual: int = 1
    """Pipeline stages on each device; at least 2 for schedule = interleaved."""
    stage_microbatches: int = 4
    """Microbatches of each device's rows in a pipeline; more of them leave stages idle for less time."""
    gather: Literal["step", "microbatch"] = "step"
    """When pipeline stages gather parameters that ZeRO shards, and reduce gradients: once per step (less traffic), or
    per microbatch (less memory)."""
    microbatches: int = 1
    """Microbatches of each device's rows, computed one after the other."""
    loss_view: Literal["auto", "local", "global"] = "auto"
    """Whether the loss sees each device's rows (local), or all rows of a microbatch, partitioned by XLA (global); auto:
    global where local is known to be wrong."""
    min_shard_size: int = 2**11
    """Arrays of fewer elements stay replicated."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Length of training, and intervals of logging, evaluation and saving."""

    steps: int = 400
    """Optimizer steps of the complete run."""
    rows: int = 16
    """Sequences per step, over all devices and microbatches."""
    seed: int = 0
    """Random seed of initial parameters, order of the text and dropout."""
    log_every: int = 10
    """Steps between two lines of metrics."""
    log_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ("tensorboard",)
    """Loggers of metrics besides metrics.jsonl: any of tensorboard, wandb, trackio."""
    eval_every: int = 100
    """Steps between two evaluations on the held-out text."""
    patience: int = 0
    """Evaluations without improvement after which the run stops; 0 never stops early."""
    min_improvement: float = 0.0
    """Least improvement that early stopping counts, in the unit of the losses shown: bits per byte for text, nats per
    token for tokens."""
    save_every: int = 0
    """Steps between two saves of the model; 0: save only at the end."""
    keep_last: int = 2
    """Number of newest saves to keep."""
    keep_every: int = 0
    """Never delete saves of steps that are multiples of this; 0: any save may be deleted."""
    start: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Start from a run's newest saved parameters (its folder), of any strategy and types, with adapters merged; or from
    a Hugging Face folder of a GPT-2 or Llama, which also defines the model. By default parameters are random."""
    keep_best: int = 0
    """Number of saves with the lowest held-out loss to keep; only saves right after an evaluation count."""
    max_skips: int = 20
    """Consecutive steps that may be skipped because loss or gradient is not finite; one more is a divergence."""
    sample: int = 0
    """Tokens or bytes of sample text to generate at the end of the run; 0: none."""
    on_divergence: Literal["end", "roll-back"] = "end"
    """After a divergence: end the run, or (at most three times) go back to the last save and go on with new rows."""
    check_every: int = 500
    """Steps between two checks that all copies of params and state are bit-identical; 0: check only at saves."""
    mend_copies: bool = False
    """If copies differ, overwrite all with the first and go on; by default the run ends."""
    hang_seconds: float = 1800.0
    """Seconds without a finished step after which a process prints its stacks and exits with status 75; 0: never."""
    heartbeat_seconds: int = 60
    """With several processes: seconds without a heartbeat after which a process counts as dead and the others end."""


@dataclasses.dataclass(frozen=True)
class Config:
    """A training run."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    lora: LoraConfig = NO_LORA
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: PrecisionConfig = PrecisionConfig()
    sharding: ShardingConfig = ShardingConfig()
    train: TrainConfig = TrainConfig()


@dataclasses.dataclass(frozen=True)
class Arguments(Config):
    """The command line of `jaxshard train`."""

    config: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="[CONFIG.toml]")] = None
    """A TOML file with a table for each section, or the name of a preset. Command-line options override it."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder of the run, new or empty; by default runs/<date>-<time>."""
    resume: tyro.conf.FlagCreatePairsOff[bool] = False
    """Resume the run saved in --out, by default with its own configuration."""
    resume_if_saved: tyro.conf.FlagCreatePairsOff[bool] = False
    """Resume the run in --out if it has a save, else start there: the same command starts and restarts."""
    profile: Annotated[str | None, tyro.conf.arg(metavar="FROM:TO")] = None
    """Trace these steps of this process (FROM:TO, counted from 0, without TO) into the run's folder profile/."""
    processes: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Run as this many local processes that share the simulated devices, to test multi-host behaviour."""
