"""Routing policies, one rule a file. Pure."""
