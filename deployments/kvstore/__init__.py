"""Start, stop and administration of the KV stores' actors."""
