"""Attention heads or layers of an engine that a lender computes for all requests."""
