"""The reference model: a decoder-only transformer."""
