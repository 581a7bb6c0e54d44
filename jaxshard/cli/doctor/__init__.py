"""`jaxshard doctor`."""
