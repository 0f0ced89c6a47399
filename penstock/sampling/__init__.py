"""Sampling: logits to tokens. A step does only the work that some row of its batch needs."""
