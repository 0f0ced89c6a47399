"""Turns a client's images into the arrays that an engine reads: sources, decoding, preparation, prompts.

Runs in API processes, with Pillow and NumPy. Nothing here imports torch.
"""
