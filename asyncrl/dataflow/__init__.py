"""The graph of MFCs, layouts of models on workers, worker groups, and redistribution of data between workers. Pure."""
