"""Start, stop and administration of the KV store's actor."""
