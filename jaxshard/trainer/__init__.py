"""The reference trainer: a byte-level transformer, its data, its loop and its folder."""
