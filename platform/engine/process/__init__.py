"""Processes of engines: how they come to be, and how others see that they work."""
