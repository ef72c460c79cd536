"""The commands of `asyncrl-launch`, one module each: `add_to(commands)` declares it; its function returns the exit code."""
