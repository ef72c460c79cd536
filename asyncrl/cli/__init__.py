"""The command line: commands, their output, and the checks of a machine and a run."""
