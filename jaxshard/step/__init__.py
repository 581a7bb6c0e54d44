"""One training step: loss, gradients, update and new params in one compiled, donating program."""
