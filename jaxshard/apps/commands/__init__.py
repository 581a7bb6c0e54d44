"""The applications' commands: `train`, `tokenize`, `generate`, `eval`, `bench`."""
