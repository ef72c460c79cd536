"""Test tools: hosts in network namespaces, groups of ranks, a socket scanner, the table of endpoints."""
