"""Checks of a configuration and of the machine, before anything starts."""
