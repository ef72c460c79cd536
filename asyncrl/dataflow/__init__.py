"""What runs where, and what moves between: the graph of MFCs, layouts, worker groups, redistribution. Pure."""
