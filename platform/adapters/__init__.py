"""LoRA adapters: which there are of each model, where their files are, and whether they fit it."""
