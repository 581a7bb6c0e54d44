"""A checkpoint on the disk: what orbax writes and reads of it, its index, what may be wrong with it."""
