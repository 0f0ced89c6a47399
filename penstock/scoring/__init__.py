"""Scores of queries and documents, computed on the device that holds their vectors."""
