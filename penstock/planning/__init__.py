"""Capacity planning: what a corpus or a stream of queries costs on a GPU. Free of torch."""
