"""Which layers of which model run on which device (HELR)."""
