"""Triton kernels, each beside its torch reference, which is the CPU path and what tests compare with."""
