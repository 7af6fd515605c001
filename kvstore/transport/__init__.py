"""Transport of KV blocks between the stores of nodes: plain TCP behind four calls."""
