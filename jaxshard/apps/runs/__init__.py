"""The folder of a run, and what lies in it."""
