"""The command line: commands, what they print, and what they find out about a machine and a run."""
