"""The parameters of a loss: how they are marked and used, and how they are gathered."""
