"""The batch lane and offline models as Ray deployments and actors."""
