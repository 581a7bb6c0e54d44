"""The reference trainer: a byte-level transformer, its data, its loop and its folder.

Read config, data, model, build and loop in this order; the other modules serve them.
"""
