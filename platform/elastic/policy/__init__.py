"""Which models sleep, are unloaded, or come, and for whom. Pure."""
