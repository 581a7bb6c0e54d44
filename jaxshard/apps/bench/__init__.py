"""Compares jaxshard's training steps with alternatives: models, alternative steps, figures."""
