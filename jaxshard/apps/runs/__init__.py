"""A run's folder and its files."""
