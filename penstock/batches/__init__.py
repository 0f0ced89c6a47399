"""Files and batches on disk, as stored by `/v1/files` and `/v1/batches`.

Each line of a batch is answered exactly once. Has neither sockets nor an engine.
"""
