"""The commands of `asyncrl-launch`, one module each. The module's `add_to(commands)` declares the command and the function that
carries it out. That function returns the exit code."""
