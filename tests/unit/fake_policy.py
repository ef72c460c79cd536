"""A routing policy in one row: the server with the highest number gets the group. test_routing.py adds it to the table."""

from __future__ import annotations

from asyncrl.manager.routing import Policy

POLICY = Policy(lambda server: -float(server.name.rpartition("/")[2]))
