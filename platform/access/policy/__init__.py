"""How limits of API keys and models are divided among gateways. Pure."""
