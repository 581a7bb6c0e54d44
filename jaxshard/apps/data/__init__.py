"""Reads text and tokens, and makes batches."""
