"""Matrix work of an update: each unit runs on one device, its owner."""
