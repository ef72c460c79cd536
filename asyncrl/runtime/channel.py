"""Channels: acknowledged messages from many senders to one receiver. Both streams are built on this file.

        ChannelSender  -- data, probes (PUSH) -->  (PULL)  ChannelReceiver
              (PULL)  <-- verdicts, what is missing (PUSH) --

A message is a typed header and raw frames, in one multipart message. It is sent again until the receiving application settles
it with a verdict (a few bytes, or a refusal with its reason), and reaches the application of one receiver incarnation once.
The address to answer to is in each message. A receiver publishes its Endpoint under a name; senders follow the name, and send
what is unsettled to whoever appears there next.

Backpressure: a receiver's application that does not receive, or does not settle, leaves the senders without credit; their
`send` then waits. What can be sent again is never more than the credit, and what waits in sockets neither.

Where things are: channel_wire.py has what crosses the wire, limits and errors; channel_sender.py and channel_receiver.py the two
ends; channel_state.py what they decide, as plain classes.
"""

from asyncrl.runtime.channel_receiver import ChannelReceiver, Delivery
from asyncrl.runtime.channel_sender import ChannelSender
from asyncrl.runtime.channel_wire import (
    ChannelClosed,
    ChannelError,
    ChannelFull,
    ChannelLimits,
    ChannelRefused,
    Endpoint,
    ReceiverRestarted,
)

__all__ = [
    "ChannelClosed",
    "ChannelError",
    "ChannelFull",
    "ChannelLimits",
    "ChannelReceiver",
    "ChannelRefused",
    "ChannelSender",
    "Delivery",
    "Endpoint",
    "ReceiverRestarted",
]
