"""`jaxshard plan`."""
