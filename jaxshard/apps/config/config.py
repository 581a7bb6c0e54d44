"""What a training run is: frozen sections, read from TOML and the command line.

The sentence under each field is its help text.
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
    """A file or folder of text, as bytes, or of tokens; stdlib: the source of Python's standard library, 8 MB; or
    MODULE:FUNCTION, or FILE.py:FUNCTION, which returns a grain.MapDataset of rows of tokens; without it, the English
    text that every Python carries, 0.5 MB."""
    format: Literal["auto", "bytes", "uint16", "uint32"] = "auto"
    """What the files hold: bytes of text, or tokens as nanoGPT and llm.c write them, which are read in place; auto:
    tokens where all files end in .bin, of uint16 unless llm.c's header says uint32."""
    heldout: float = 0.1
    """The last part of the text, never trained on, that measures the model."""
    heldout_path: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """A file or folder that measures the model, in place of the last part; in a folder of tokens those files do that
    have val in their names. Or a function, as for path."""
    heldout_bytes: int = 2**18
    """The most held-out bytes, or tokens, that an evaluation uses."""


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
    """Heads of keys and values, each shared by heads / kv_heads queries; 0: the same number as heads."""
    hidden: int = 512
    """Features between the two halves of each MLP."""
    sequence_length: int = 128
    """Bytes that the model sees at once."""
    vocabulary: int = 256
    """Number of token ids, 256 for bytes; more only makes the model as large as one with a tokenizer."""
    positions: Literal["rotary", "learned"] = "rotary"
    """How positions enter: turned queries and keys, or a learned vector for each."""
    rotary_base: float = 10_000.0
    """The slowest rotary positions turn about this many times slower than the fastest; Llama 3 has 500000."""
    rotary_factor: float = 1.0
    """Slows the slow rotary positions down, as Llama 3.1 does (by 8): those that turn less than once in rotary_length
    positions by all of it, those that turn four times not at all."""
    rotary_length: int = 8192
    """Positions that the model had before rotary_factor made room for more."""
    norm: Literal["rms", "layer"] = "rms"
    """Norm before attention, MLP and output: by the mean square alone, or of what the mean is taken from."""
    norm_epsilon: float = 1e-6
    """Added to the mean square before the norm divides by its root; GPT-2 has 1e-5."""
    bias: bool = False
    """Biases of the blocks' matrices and of layer norms, as GPT-2 has them."""
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    """The MLP's non-linearity, gated (swiglu) or plain (gelu)."""
    tied: bool = False
    """Use the embedding as the output layer too."""
    dropout: float = 0.0
    """Part of each block's output that is dropped in training."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the computation; those of parameters, gradients and state are in [precision]."""
    remat: bool = True
    """Recompute each block in the backward pass instead of keeping what it computed."""
    attention: Literal["auto", "fused", "xla"] = "auto"
    """auto: in one kernel (cuDNN's on GPU, Pallas's splash on TPU) where there is one, else by plain operations;
    fused: an error where there is none; xla: always by plain operations, which write all pairs of positions."""
    loss_chunk: int = -1
    """Positions of each row whose logits exist at once, a divisor of sequence_length; the backward pass makes them
    again. 0: all; -1: as many as take 512 MB in float32."""


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Adapters of low rank beside the frozen matrices of a trained model, in place of all of its parameters."""

    rank: int = 0
    """Inner size of the adapters of each matrix in the blocks, which alone are trained; 0: no adapters, all is
    trained. The model comes from train.start."""
    alpha: float = 16.0
    """An adapter's product is multiplied by alpha / rank."""
    base: Literal["", "float32", "bfloat16", "int8"] = ""
    """Type of the frozen parameters, by default precision.params; int8: the blocks' matrices in 8 bits with a scale for
    each output, all else in bfloat16."""

    @property
    def factor(self) -> float:
        """What multiplies the product of an adapter's two matrices."""
        return self.alpha / self.rank if self.rank else 0.0

    def float_base(self, dtype: str) -> str:
        """The type of frozen floats, where what is trained has `dtype`."""
        return {"": dtype, "int8": "bfloat16"}.get(self.base, self.base)


NO_LORA = LoraConfig()
"""All parameters are trained."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, or another of optax's, with warm-up and cosine decay of the learning rate."""

    name: str = "adamw"
    """Any optimizer of optax or optax.contrib that has a learning rate: lion, muon, adafactor, sgd and others. muon has
    the blocks' matrices, and AdamW the rest."""
    arguments: str = ""
    """More of its arguments, as TOML: b1 = 0.9, nesterov = true."""
    learning_rate: float = 3e-3
    """Highest learning rate, reached after the warm-up."""
    warmup_steps: int = 50
    """Steps in which the learning rate rises from zero."""
    final_fraction: float = 0.05
    """Learning rate at the last step, as part of the highest."""
    beta1: float | None = None
    """Decay of the mean of gradients; by default optax's, 0.9 for AdamW."""
    beta2: float | None = None
    """Decay of the mean of squared gradients; by default 0.98 for AdamW, and optax's for others."""
    weight_decay: float | None = None
    """Decay of the matrices, by default 0.1 for optimizers that take one; norms and embeddings are left alone."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm."""


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    """Types of what is kept and sent; the computation's is model.dtype."""

    params: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the parameters and their gradients."""
    masters: bool = False
    """Keep float32 masters in the state; narrower parameters are rounded from them."""
    moments: Literal["float32", "bfloat16", "int8"] = "float32"
    """Type in which AdamW's moments are kept (bfloat16: rounded stochastically; int8: in 8-bit codes, too, with a scale
    for each block of 128, but for small leaves and tables); it computes with them in float32."""
    reduce: Literal["", "float32", "bfloat16", "float16"] = ""
    """Type in which gradients are summed over microbatches and devices; by default the parameters'."""
    stochastic_rounding: bool = False
    """Update bfloat16 parameters in float32 and round up or down by chance: masters' work without their memory."""
    loss_scale: bool = False
    """Scale the loss so that float16 gradients neither vanish nor overflow; the scale finds itself."""


@dataclasses.dataclass(frozen=True)
class ShardingConfig:
    """Which device holds what."""

    strategy: Literal[
        "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "tensor_parallel", "pipeline_parallel", "hybrid"
    ] = "zero2"
    """ddp cuts nothing, zero1 the state, zero2 gradients too, zero3 (= fsdp) parameters too, hsdp these within each
    replica, tensor_parallel single layers, pipeline_parallel the stack of layers, and hybrid all of these."""
    devices: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Devices to use, by default all. Without an accelerator CPU devices are simulated, by default 8."""
    data: int = -1
    """Size of the mesh axis that shards are cut over; -1 takes the devices that are left."""
    replica: int = 1
    """Size of the mesh axis that shards are repeated over (for hsdp at least 2)."""
    state_over: Literal["data", "data+replica"] = "data"
    """Mesh axes that the optimizer's state is cut over, where the strategy cuts it: with hsdp, data+replica cuts it
    over all devices, and parameters within each replica."""
    state_memory: str = "device"
    """Where the optimizer's state lies: device; host, streamed through the devices in each update; or a fraction of its
    bytes there, host:0.5."""
    regather: Literal["use", "step"] = "use"
    """When parameters that are cut are gathered: where they are used, forwards and backwards, or once per step, which
    sends less and holds them whole."""
    tensor: int = 1
    """Size of the mesh axis whose devices share each layer (tensor_parallel, hybrid)."""
    pipeline: int = 1
    """Size of the mesh axis whose devices are stages of layers (pipeline_parallel, hybrid)."""
    zero: int = 2
    """What hybrid cuts over data: 0 nothing, 1 state, 2 gradients too, 3 parameters too."""
    sequence_parallel: bool = False
    """Cut activations between the layers along the sequence, over the tensor axis."""
    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    """In which order the stages take the microbatches."""
    virtual: int = 1
    """Stages of layers on each device, for schedule = interleaved at least 2."""
    stage_microbatches: int = 4
    """Parts of each device's rows that a pipeline passes from stage to stage; more of them waste less time."""
    gather: Literal["step", "microbatch"] = "step"
    """When the stages gather parameters that ZeRO has cut and reduce gradients: less traffic, or less memory."""
    microbatches: int = 1
    """Parts of each device's rows that are computed one after the other."""
    min_shard_size: int = 2**11
    """Arrays of fewer elements stay whole on every device."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long, how often."""

    steps: int = 400
    """Optimizer steps of the whole run."""
    rows: int = 16
    """Sequences per step, over all devices and microbatches."""
    seed: int = 0
    """Decides initial parameters, order of the text and dropout."""
    log_every: int = 10
    """Steps between two lines of metrics."""
    log_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ("tensorboard",)
    """Where metrics go besides metrics.jsonl: tensorboard, wandb, trackio, or several of them, or nowhere."""
    eval_every: int = 100
    """Steps between two evaluations on the held-out text."""
    patience: int = 0
    """Evaluations without improvement after which the run stops; 0 never stops early."""
    min_improvement: float = 0.0
    """Bits per byte by which an evaluation must be better than the best to count as an improvement."""
    save_every: int = 0
    """Steps between two saves of the model; 0 saves only at the end."""
    keep_last: int = 2
    """How many of the newest saves are kept."""
    keep_every: int = 0
    """Saves of steps that are divisible by this are never deleted; 0: all may be."""
    start: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder of a run whose newest saved parameters this one starts from, whatever its strategy and types; adapters
    that it has are merged. Or a Hugging Face folder of a GPT-2 or Llama, which says what the model is. By default
    parameters are random."""
    keep_best: int = 0
    """How many saves of the lowest held-out loss are kept; only a save that follows an evaluation counts."""
    max_skips: int = 20
    """Steps in a row that may be skipped because loss or gradient is not finite; one more is a divergence."""
    sample: int = 0
    """Tokens, or bytes, that the model writes at the end of the run, as an example; 0: none."""
    on_divergence: Literal["end", "roll-back"] = "end"
    """End the run, or (at most three times) go back to the last save and go on with other rows."""
    check_every: int = 500
    """Steps between two checks that all copies of params and state are the same to the bit; 0 checks only saves."""
    mend_copies: bool = False
    """Where copies differ, overwrite all with the first and go on; by default the run ends."""
    hang_seconds: float = 1800.0
    """Seconds without the end of a step after which a process shows its stacks and exits with status 75; 0: never."""
    heartbeat_seconds: int = 60
    """With several processes: seconds of silence after which a process counts as dead, and the others end."""


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
    """Options in TOML, a table for each section; the command line has the last word."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder of the run, new or empty; by default runs/<date>-<time>."""
    resume: tyro.conf.FlagCreatePairsOff[bool] = False
    """Go on with the run saved in --out, by its own configuration where none is given."""
    resume_if_saved: tyro.conf.FlagCreatePairsOff[bool] = False
    """Go on with what is saved in --out, if anything is, else start there: the same command starts and restarts."""
    profile: Annotated[str | None, tyro.conf.arg(metavar="FROM:TO")] = None
    """Trace these steps of this process, counted from 0 as in Python's range, into the run's folder profile/."""
    processes: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Start this number of processes here and deal the (simulated) devices out to them, to try a cluster's ways."""
