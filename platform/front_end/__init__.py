"""Front ends: they serve a model's API on token-level engines, and outlive each of these."""
