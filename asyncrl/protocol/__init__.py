"""The messages that processes exchange, one module per conversation, and the name-resolve keys under which they find
each other.

All messages are msgspec structs: encoded as MessagePack on ZeroMQ streams and as JSON on HTTP, and validated on
arrival. No data from a socket is unpickled. Tensors travel only in raw frames beside the header (data/sequence.py).
"""
