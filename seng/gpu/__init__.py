"""CUDA graphs and Triton kernels: an accelerator for the other rooms."""
