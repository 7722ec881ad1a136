"""The engine host: the child process in which the engine runs, and its commands."""
