"""Lending: attention of one engine's requests is computed by another's device, in its memory."""
