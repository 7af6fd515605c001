"""Index of the blocks in a store, and the order in which they are evicted. Pure."""
