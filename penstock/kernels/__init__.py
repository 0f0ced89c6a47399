"""Kernels that the layers, poolers and scorers call; each file holds one beside its plain-torch reference."""
