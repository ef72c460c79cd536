"""Tools for tests and small tasks. `tiny`, `warm_start` and `chat_model` keep names and arguments within a major version."""
