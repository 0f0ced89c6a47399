"""Triton kernels. Each has a torch reference beside it, which runs on a CPU and which tests compare with."""
