"""HTTP servers of a run's processes: where they are bound, and who is answered (security.py)."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from asyncrl.runtime import security, unix_sockets


async def serve(
    runner: web.BaseRunner, host: str, port: int = 0, *, backlog: int = 1024, for_others: bool = False
) -> str:
    """Bind (0: a free port) and serve what `runner` has; returns the URL to publish. The runner is cleaned up by its owner.

    A run that has Unix sockets serves on one of them. for_others: on TCP all the same, for clients that are not ours.
    """
    secured, tls = security.current(), None
    if secured is not None:
        tls = secured.serve_others_tls if for_others else secured.serve_tls
    await runner.setup()
    if not for_others and (path := unix_sockets.new_path()):
        await web.UnixSite(runner, path, backlog=backlog).start()
        return unix_sockets.url_of(path)
    await web.TCPSite(runner, host, port, backlog=backlog, ssl_context=tls).start()
    bound = runner.addresses[0][1]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if tls is not None else 'http'}://{shown}:{bound}"


def refusal_of(request: web.BaseRequest) -> web.Response | None:
    """What a stranger is answered. None: the request is of one of the run's processes. No body has been read yet."""
    secured = security.current()
    if secured is None or secured.allows(request.headers.get("Authorization", "")):
        return None
    told = "this endpoint answers the processes of its run; the token is in <run>/secrets/token\n"
    answer = web.Response(status=401, text=told, headers={"WWW-Authenticate": "Bearer"})
    answer.force_close()
    return answer


@web.middleware
async def for_the_run(request: web.Request, handler: Any) -> web.StreamResponse:
    """Strangers are refused, whatever they ask for."""
    reply: web.StreamResponse = refusal_of(request) or await handler(request)
    return reply
