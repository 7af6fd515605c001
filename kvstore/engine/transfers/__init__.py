"""The threads that copy blocks beside an engine's steps, from and to CPUs and GPUs."""
