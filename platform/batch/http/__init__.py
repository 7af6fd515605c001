"""OpenAI's files and batches over HTTP."""
