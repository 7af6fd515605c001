"""Processes of engines: how they come to be."""
