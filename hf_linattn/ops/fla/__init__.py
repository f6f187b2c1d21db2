"""The delta rule by the kernels of flash-linear-attention, on GPUs where that is installed."""
