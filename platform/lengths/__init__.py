"""Length estimation: predictions of how many tokens an answer will have."""
