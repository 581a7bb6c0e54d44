"""The arithmetic that a training step cannot do without."""

from __future__ import annotations

from jaxshard.trainer.config import Config, ModelConfig


def useful_flops(config: Config) -> float:
    """Multiplications and additions of a step's matrix products on all devices together, none of them made twice.

    Each position takes 6 for each element of a matrix (one product forward, two backward: Chowdhery et al. 2022, PaLM,
    appendix B). Attention, which is causal, looks at half of the pairs of positions.
    """
    model = config.model
    positions = config.train.rows * model.sequence_length
    attention = model.layers * model.width * model.sequence_length  # two products of half of the pairs
    return 6.0 * positions * (_num_multiplied(model) + attention)


def _num_multiplied(model: ModelConfig) -> int:
    """Elements of the matrices that each position is multiplied by; a table is only looked up."""
    groups = model.kv_heads or model.heads
    attention = model.width * (model.width // model.heads) * (model.heads + 2 * groups) + model.width**2
    mlp = (3 if model.mlp == "swiglu" else 2) * model.width * model.hidden
    return model.layers * (attention + mlp) + model.width * model.vocabulary
