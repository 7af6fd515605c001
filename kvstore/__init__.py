"""KV store of a node: its engines share KV blocks, which outlive the engine that computed them."""
