"""One training step, in the order of the data: options, layout, collectives, state, update, gradients, step."""
