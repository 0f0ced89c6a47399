"""Files and batches on disk: what `/v1/files` and `/v1/batches` store, and how a batch is answered exactly
once. No sockets and no engine."""
