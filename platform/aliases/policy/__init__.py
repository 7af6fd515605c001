"""Which model of an alias a request gets. Pure."""
