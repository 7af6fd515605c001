"""What the batch lane decides on and by. Pure."""
