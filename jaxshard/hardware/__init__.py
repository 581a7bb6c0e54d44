"""Facts of machines, with their sources: chips, links, and machines made of them."""
