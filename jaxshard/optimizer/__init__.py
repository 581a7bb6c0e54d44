"""The sharded optimizer: its state, its update in the global view, and the check that values are finite."""
