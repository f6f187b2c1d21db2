"""Linear attention by Triton kernels on GPUs."""
