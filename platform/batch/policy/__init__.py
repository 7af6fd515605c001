"""Decisions of the batch lane, and what they are made on. Pure."""
