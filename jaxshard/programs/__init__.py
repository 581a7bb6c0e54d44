"""Reads traced programs: one walk, one table of primitives, and the analyses."""
