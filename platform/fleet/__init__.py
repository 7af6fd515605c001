"""Which replicas there are, and what each is to do."""
