"""Reads traced programs: one walk, one table of primitives, and the questions that analyses ask."""
