"""What a run shows and records while it trains."""
