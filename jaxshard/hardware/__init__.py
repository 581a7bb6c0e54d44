"""Figures of chips, links and machines, each with its source, and what compilers are told of those not here."""
