"""Kernels, each beside its plain-torch reference: the reference is the CPU path and the test's oracle."""
