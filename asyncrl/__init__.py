"""asyncrl: asynchronous reinforcement learning of language models, without Ray.

DESIGN.md in the repository is the map; each module's docstring places it in the dataflow.
"""

import sys  # and no other module: it could be a file of the user's current folder

if sys.argv and sys.argv[0] == "-m" and not sys.flags.safe_path:
    # `python -m asyncrl...` puts the current folder first. It comes last, so that a user's queue.py replaces no module
    sys.path.append(sys.path.pop(0))

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`from asyncrl import Run`. Imported when it is used: most processes of a run need only their own part of the package."""
    if name == "Run":
        from asyncrl.api import Run

        return Run
    raise AttributeError(f"module 'asyncrl' has no attribute {name!r}")
