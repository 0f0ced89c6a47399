"""Jobs that read many rows, compute their vectors and write each row once, however often a run stops."""
