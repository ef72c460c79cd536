"""Runs programs that are not trusted. Imports nothing else of asyncrl."""
