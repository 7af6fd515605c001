"""The KV store of a node as a Ray actor."""
