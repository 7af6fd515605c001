"""The adapters that an engine has, and how a CPU computes them."""
