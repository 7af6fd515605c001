"""Stores of other nodes: who they are, what they announce, and how fast their blocks come."""
