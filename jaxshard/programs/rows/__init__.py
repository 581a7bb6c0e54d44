"""The rows of a batch inside a traced loss: whether the loss is a mean over rows, and where it mixes them."""
