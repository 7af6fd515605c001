"""HTTP between the decode and prefill replicas of a model."""
