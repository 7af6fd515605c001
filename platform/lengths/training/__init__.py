"""How predictors are trained, measured and kept learning."""
