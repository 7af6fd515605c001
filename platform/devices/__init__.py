"""Devices of this machine: what binds processes to them, and memory for so many."""
