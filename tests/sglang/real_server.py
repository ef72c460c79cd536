"""A real SGLang server for tests, on an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from asyncrl.config.schema import GenerationConfig
from asyncrl.generation.server_client import ServerError
from asyncrl.generation.server_process import ServerProcess
from asyncrl.generation.sglang_http import SGLangClient
from asyncrl.generation.sglang_process import own_server

START_LIMIT_S = 240.0  # about 15 s on an idle machine; other processes compete with it


class ServerInThread:
    """A server of ours that outlives event loops, because it starts and stops on a loop of its own."""

    def __init__(self, config: GenerationConfig, model_path: Path, log: Path, *, returns_routes: bool = False) -> None:
        """Start the server."""
        self._config, self._model_path, self.log, self._returns_routes = config, model_path, log, returns_routes
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="server of the tests", daemon=True).start()
        self.process = self._start()

    def _start(self) -> ServerProcess:
        async def start() -> ServerProcess:
            process = own_server(
                self._config,
                str(self._model_path),
                tensor=1,
                seed=1,
                log=self.log,
                returns_routes=self._returns_routes,
            )
            client = SGLangClient("")

            async def is_ready(url: str) -> bool:
                client.url = url
                try:
                    await client.info(limit_s=5.0)
                except ServerError:
                    return False
                return True

            try:
                await process.start(is_ready, START_LIMIT_S)
            finally:
                await client.close()
            return process

        return asyncio.run_coroutine_threadsafe(start(), self._loop).result(START_LIMIT_S + 30)

    def revive(self) -> None:
        """Start another server if a test has killed this one."""
        if self.process.how_it_ended() is not None:
            self.close()
            self.process = self._start()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.process.close(), self._loop).result(60)
