"""Index of a store's blocks, their order of eviction, and what other nodes have. Pure."""
