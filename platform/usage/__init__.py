"""What each API key has used of each model, kept for accounting."""
