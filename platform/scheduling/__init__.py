"""Decisions inside an engine: who is served first, who is preempted, and how. Pure."""
