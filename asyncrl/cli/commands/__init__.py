"""The commands of `asyncrl-launch`, a module each: `add_to(commands)` declares it; its function returns the exit code."""
