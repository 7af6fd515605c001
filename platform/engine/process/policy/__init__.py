"""When an engine's process that says nothing is slow, and when it is wedged. Pure."""
