"""The optimizer inside: its update as optax would call it, and what the traced update says of it."""
