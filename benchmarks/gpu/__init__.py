"""What lending between GPUs, and the store on one, take: steps that need a GPU, or only play it.

Nothing here imports more of Loomserve than the kernels, nor Ray, vLLM or other benchmarks: a
machine with torch and Triton is enough.
"""
