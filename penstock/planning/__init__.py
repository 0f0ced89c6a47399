"""Capacity planning: the cost of a corpus or a stream of queries on a GPU. Does not import torch."""
