"""Which blocks there are and which leave first. Pure."""
