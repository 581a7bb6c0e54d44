"""A checkpoint on disk: orbax's files, the index, their errors."""
