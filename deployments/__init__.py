"""Ray Serve deployments: thin shells around plain classes."""
