"""A configuration: its options, its file, what each value may be."""
