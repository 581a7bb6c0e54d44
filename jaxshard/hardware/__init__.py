"""Figures of chips, links and machines, each with its source; the data that AOT compilers need."""
