"""Actuators: each carries out one kind of a plan's actions, and takes it back."""
