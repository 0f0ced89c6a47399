"""The tasks of the engine, one module each, shared by the server, the offline engines and the commands."""
