"""Tools of the tests: hosts in network namespaces, groups of ranks, a scanner of sockets, the table of endpoints."""
