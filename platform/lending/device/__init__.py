"""Loans whose attention is computed by kernels on devices, with control words in the task ring."""
