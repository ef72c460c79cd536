"""The two kinds of streams between processes: push-pull streams carry trajectories, request-reply streams carry MFC
calls. Both stand on `runtime/channel.py`, which knows nothing of samples and calls.
"""
