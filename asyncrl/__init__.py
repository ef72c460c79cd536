"""asyncrl: asynchronous reinforcement learning of language models, without Ray.

DESIGN.md in the repository is the map; each module's docstring places it in the dataflow.
"""

__version__ = "0.1.0"
