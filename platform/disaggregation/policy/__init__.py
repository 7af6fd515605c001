"""Which replica computes a prompt, and which one answers it. Pure."""
