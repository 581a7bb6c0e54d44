"""Logs a run: terminal, metrics, trackers, profiles."""
