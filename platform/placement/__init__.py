"""Placement: which layers of a model run on which device (HELR)."""
