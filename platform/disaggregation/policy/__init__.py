"""Where a prompt is computed, and whether the chosen replica still answers. Pure."""
