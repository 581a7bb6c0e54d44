"""The inner optimizer: its update, called as optax calls it, and questions that the traced update answers."""
