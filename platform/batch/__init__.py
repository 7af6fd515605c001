"""The batch lane: OpenAI's files and batches, computed as work of the lowest priority."""
