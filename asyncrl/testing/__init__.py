"""Tools for tests and small tasks. Public: tiny, warm_start, chat_model. The others may change at any time."""
