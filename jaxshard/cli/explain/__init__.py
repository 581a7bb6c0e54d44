"""`jaxshard explain`."""
