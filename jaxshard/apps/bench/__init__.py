"""Training steps of jaxshard beside those by other means: models, peers, and the figures of each."""
