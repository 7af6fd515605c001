"""What a model's files say about it: pure functions of their content."""
