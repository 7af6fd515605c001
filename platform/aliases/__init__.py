"""Aliases: names that stand for several models by weight, changed while they serve."""
