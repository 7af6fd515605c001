"""Rebalancing plans: as operators see them, what became of them, and their SQLite."""
