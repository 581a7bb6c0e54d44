"""The local view: `update` inside a user's own `jax.shard_map`, and what it rejects."""
