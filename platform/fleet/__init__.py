"""Replicas that there are, and the state desired of each."""
