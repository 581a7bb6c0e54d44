"""The sharded optimizer: its state, its update in the global view, and how it is judged."""
