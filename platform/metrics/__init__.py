"""What Prometheus sees: the gateways' own metrics, and one exposition for the whole platform."""
