"""`jaxshard ckpt`."""
