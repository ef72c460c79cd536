"""GenerationServer: the process that samples. It owns one engine and serves it over HTTP.

In: prompts (POST /generate, from rollout workers); weight versions from disk (POST /update_weights_from_disk, from the gserver
manager) or over the network (receive.py). Out: tokens, logprobs and the version that sampled them. The server starts without a
version and generates nothing until it has loaded one at the manager's request. It publishes its address after the socket is bound.
"""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import AsyncExitStack
from typing import Any

from asyncrl.config.processes import GenerationServerConfig
from asyncrl.generation.checks import VerifiedLoads
from asyncrl.generation.engine import EngineUnavailable, GenerationEngine
from asyncrl.generation.engines import Engines, engines_of
from asyncrl.generation.fetched import FetchedWeights
from asyncrl.generation.http import GenerationHTTP
from asyncrl.generation.journal import FLUSH_INTERVAL_S, TokenJournal
from asyncrl.protocol.names import ACTOR
from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime.directory import Directory
from asyncrl.runtime.names.interface import NameEntryNotFound, NameResolveTimeout
from asyncrl.runtime.system import System
from asyncrl.runtime.worker import Worker
from asyncrl.weights.fetch import WeightFetcher, fetch_folder, run_key

_START_SLACK_S = 20.0  # time for a start that exceeds load_timeout_s to report the reason and to end its processes


class GenerationServer(Worker):
    """A generation server. Its event loop serves HTTP; the engine computes on its own thread or in SGLang's processes."""

    def __init__(
        self, config: GenerationServerConfig, system: System | None = None, engines: Engines | None = None
    ) -> None:
        super().__init__(config.worker, system)
        self._config = config
        self._engines = engines if engines is not None else engines_of(config, self.trace, self.system.clock)

    async def run(self, directory: Directory, opened: AsyncExitStack) -> None:
        config, engines = self._config, self._engines
        journal = engines.journal()
        opened.callback(journal.close)
        tokenizer = await asyncio.to_thread(engines.tokenizer)
        engine = await asyncio.to_thread(engines.make, journal, tokenizer.eos_token_id)
        after_engine = await opened.enter_async_context(AsyncExitStack())
        opened.push_async_callback(engine.close)  # fails the requests in flight, so that the HTTP handlers return
        if not config.shares_devices:  # otherwise the engine starts when the manager wakes it
            what, on = engines.start_wait()
            self.logger.info("%s (%s)", what, on)
            limit_s = config.generation.load_limit_s + _START_SLACK_S
            await self.board.bounded(engine.start(), what=what, on=on, limit_s=limit_s, detail=engine.progress)
        fetched = await asyncio.to_thread(self._open_fetched, directory) if config.fetch else None
        if fetched is not None:
            after_engine.callback(fetched.close)
        http = GenerationHTTP(
            engine,
            engine_name=config.engine,
            settings=dataclasses.asdict(config.generation),
            decode_text=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
            verified=self._verified_loads(engine),
            receiver=engine.weight_receiver(self.info.runtime.host) if not config.shares_devices else None,
            fetched=fetched,
            run_dir=self.info.run_dir,
            published=lambda: self._published(directory),
            clock=self.system.clock,
        )
        url = await after_engine.enter_async_context(http.listening(self.info.runtime.host, self.system.listen))
        await directory.publish(self.names.generation_server(self.info.index), url)
        self.logger.info("serving at %s, without weights yet", url)
        self.began()
        await self._report_and_expire(engine, journal)

    async def _report_and_expire(self, engine: GenerationEngine[Any], journal: TokenJournal) -> None:
        """Once a second: update status and journal, and end requests that have waited too long.

        Consumes nothing; produces status and journal. Waits for the clock only. Raises RuntimeError when the engine has died.
        """
        while True:
            stats = engine.stats()
            self.board.version = stats.version
            self.board.set_queue("running", stats.running)
            self.board.set_queue("waiting", stats.waiting)
            self.board.progress()
            if (failure := engine.failure) is not None:
                why = (str(failure) or repr(failure)).splitlines()[0]
                raise RuntimeError(f"the engine has died: {why}") from failure
            if expired := engine.expire_waiting():
                message = (
                    "%d requests waited too long and were answered: 503, or the tokens so far of a retracted request"
                )
                self.logger.warning(message, expired)
            await asyncio.to_thread(journal.flush)
            await asyncio.sleep(FLUSH_INTERVAL_S)

    async def _published(self, directory: Directory) -> WeightVersion | None:
        """The newest version that the trainer has on disk or in memory. None: name resolve lists no version."""
        found = []
        for key in (self.names.model_version(ACTOR), self.names.weights_held(ACTOR)):
            try:
                found.append(WeightVersion.parse(await asyncio.to_thread(directory.resolver.get, key)))
            except NameEntryNotFound:
                continue
            except (NameResolveTimeout, ValueError) as error:
                raise EngineUnavailable(f"the published weight version is not known: {error}") from error
        return max(found, default=None)

    def _open_fetched(self, directory: Directory) -> FetchedWeights:
        info = self.info
        run = run_key(info.experiment, info.trial, info.run_dir, info.runtime.host)
        folder = fetch_folder(self._config.fetch_dir)
        fetcher = WeightFetcher(folder, run, host=info.runtime.host, logger=self.logger)
        return FetchedWeights(fetcher, lambda: self._source(directory))

    async def _source(self, directory: Directory) -> str:
        """The base URL under which the gserver manager serves versions; "" if name resolve has none now."""
        try:
            return await asyncio.to_thread(directory.resolver.get, self.names.weight_files(ACTOR))
        except (NameEntryNotFound, NameResolveTimeout) as error:
            self.logger.warning("the address of the weight files is not known: %s", error)
            return ""

    def _verified_loads(self, engine: GenerationEngine[Any]) -> VerifiedLoads | None:
        """Make the check that the engine computes the trainer's logprobs after each load. None: weights.verify_logprobs is off, or
        was not set and is not possible here (config/resolve.py, _logprob_check)."""
        tolerance = self._config.verify_tolerance
        if not tolerance:
            self.logger.info("no logprob check after updates (weights.verify_logprobs)")
        limit_s = self._config.generation.load_limit_s
        return VerifiedLoads(engine, tolerance=tolerance, limit_s=limit_s, logger=self.logger) if tolerance else None
