"""One KV store for the cluster: blocks outlive the engine that made them."""
