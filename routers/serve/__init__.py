"""The shells that Ray Serve runs routing policies in."""
