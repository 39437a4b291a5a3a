"""CUDA graphs, Triton kernels and staging: an accelerator for the other rooms."""
