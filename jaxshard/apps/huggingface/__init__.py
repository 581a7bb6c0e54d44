"""Models in Hugging Face's folders: read as the start of a run, and written."""
