"""Files, text, signals and processes: what any program needs of the system that it runs on."""
