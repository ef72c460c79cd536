"""Tools for tests and small tasks. The API of `tiny`, `warm_start` and `chat_model` is stable within a major version."""
