"""The `loomserve` command, one file a capability."""
