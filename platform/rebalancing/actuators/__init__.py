"""What carries a plan's actions out."""
