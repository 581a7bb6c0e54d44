"""`jaxshard completion`."""
