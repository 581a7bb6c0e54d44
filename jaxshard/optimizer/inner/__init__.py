"""The inner optimizer: its update, called as optax calls it, and analyses of its trace."""
