"""Matrix work of an update: each unit runs whole on one device, its owner."""
