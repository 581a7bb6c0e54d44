"""Reads and writes models in Hugging Face's format."""
