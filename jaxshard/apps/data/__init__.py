"""Text and tokens, and the batches made of them."""
