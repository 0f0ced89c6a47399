"""What the engine can be asked for: one file a task, shared by the server, the offline engines and the
commands."""
