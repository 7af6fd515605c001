"""What a model's files say about it: pure functions, told what is in them."""
