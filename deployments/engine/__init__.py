"""A node's engines, which one actor starts, watches and ends, and replicas that hold them."""
