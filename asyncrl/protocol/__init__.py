"""The messages that processes exchange, and the name-resolve keys under which they find each other."""
