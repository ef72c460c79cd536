"""Runs untrusted programs in isolation. Imports nothing else from asyncrl."""
