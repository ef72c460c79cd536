"""Bounds the number of connections of a ZeroMQ socket that receives over TCP."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import resource
import secrets
import socket
import struct
import threading

import zmq
from zmq.utils.monitor import recv_monitor_message

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 4096
_EVENTS = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # from asm-generic/socket.h; Python's socket module lacks them
_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # one instruction: return 0


def bound_connections(receiver: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Limit the connections of a receiving socket that is not yet bound.

    The socket answers no further connection while it has MAX_CONNECTIONS, or half of the process's file limit if that
    is less. Existing connections continue, and refused clients keep retrying.

    ZeroMQ has no such limit, and unbinding would end the connections. Instead, the listening socket gets a filter that
    drops its packets (socket(7), SO_ATTACH_FILTER). The sockets of existing connections do not have the filter.
    ZeroMQ itself disconnects clients that do not authenticate within ZMQ_HANDSHAKE_IVL.
    """
    address = f"inproc://doorkeeper/{secrets.token_hex(8)}"
    receiver.monitor(address, _EVENTS)
    events = context.socket(zmq.PAIR)
    events.setsockopt(zmq.LINGER, 0)
    events.setsockopt(zmq.RCVHWM, 0)  # a full queue would block ZeroMQ's own thread
    events.connect(address)
    threading.Thread(target=_watch, args=(events,), name="doorkeeper", daemon=True).start()


def _watch(events: zmq.Socket[bytes]) -> None:
    """Watch the connections on a thread, because a busy event loop would react too late to a flood.

    waits for: connections that open or close.  unblocked by: such a connection; the end of the receiver or the context.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, files // 2)
    listening: socket.socket | None = None
    connections: set[int] = set()  # file descriptors of the connections
    shut = False
    try:
        while (event := recv_monitor_message(events))["event"] != zmq.EVENT_MONITOR_STOPPED:
            if event["event"] == zmq.EVENT_LISTENING:
                try:
                    listening = socket.socket(fileno=os.dup(event["value"]))
                except OSError as error:
                    if error.errno != errno.EBADF:  # EBADF: the receiver is closed already
                        logger.warning("cannot limit the number of connections: %s", error)
            elif event["event"] == zmq.EVENT_ACCEPTED:
                connections.add(event["value"])
            else:
                connections.discard(event["value"])
            if listening is not None and shut != (len(connections) >= most):
                shut = not shut
                try:
                    _set_shut(listening, shut)
                except OSError as error:  # a kernel without packet filters; this thread must keep reading events
                    logger.warning("cannot limit the number of connections: %s", error)
                if shut:
                    logger.warning(
                        "%s has %d connections, its limit: it accepts no more", event["endpoint"].decode(), most
                    )
    except zmq.ContextTerminated:
        pass
    finally:
        events.close(linger=0)
        if listening is not None:
            listening.close()


def _set_shut(listening: socket.socket, shut: bool) -> None:
    if shut:
        program = struct.pack("HP", 1, ctypes.addressof(_DROP_ALL))
        listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    else:
        listening.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
