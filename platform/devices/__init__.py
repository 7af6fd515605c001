"""Devices of this machine: claimed by one replica each, with memory for so many."""
