"""Scores of queries and documents, made on the device that has their vectors."""
