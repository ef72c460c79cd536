"""GenerationServer: the process that samples. Owns one engine and serves it over HTTP.

Engines (`_make_engine`): transformers, which computes here; sglang, a SGLang server that this process starts and owns; external,
one that somebody else runs.

In: prompts (POST /generate, from rollout workers); weight versions on disk (POST /update_weights_from_disk, from the gserver
manager). Out: tokens, logprobs and the version that sampled them. It starts without a version and generates nothing until the
manager has had it load one. The address is published once the socket is bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

from asyncrl.config.schema import GenerationServerConfig
from asyncrl.data.prompts import load_tokenizer
from asyncrl.dataflow.topology import ENGINES
from asyncrl.generation.engine import EngineUnavailable, GenerationEngine
from asyncrl.generation.fetched import FetchedWeights
from asyncrl.generation.http import GenerationHTTP
from asyncrl.generation.journal import FLUSH_INTERVAL_S, TokenJournal, journal_path
from asyncrl.generation.verify import VerifiedLoads
from asyncrl.protocol.messages import WeightVersion
from asyncrl.protocol.names import ACTOR
from asyncrl.runtime.loading import LoadProgress
from asyncrl.runtime.names.interface import NameEntryNotFound, NameResolveTimeout
from asyncrl.runtime.worker import Worker
from asyncrl.weights.fetch import WeightFetcher, fetch_folder, run_key

_START_SLACK_S = 20.0  # a start that takes too long says itself why, and ends what it started


class GenerationServer(Worker):
    """A generation server. Its event loop serves HTTP; the engine computes on a thread of its own, or in SGLang's processes."""

    def __init__(self, config: GenerationServerConfig) -> None:
        _check_config(config)
        super().__init__(config.worker)
        self._config = config
        self._engine: GenerationEngine | None = None
        self._http: GenerationHTTP | None = None
        self._journal: TokenJournal | None = None
        self._fetched: FetchedWeights | None = None

    async def setup(self) -> None:
        config = self._config
        self._journal = TokenJournal(journal_path(self.info.run_dir, self.info.index))
        tokenizer = await asyncio.to_thread(load_tokenizer, config.tokenizer_path)
        self._engine = await asyncio.to_thread(self._make_engine, self._journal, tokenizer.eos_token_id)
        with self._start_shown(self._engine) as (what, on, detail):
            self.logger.info("%s (%s)", what, on)
            limit_s = config.generation.load_timeout_s + _START_SLACK_S
            await self.board.bounded(self._engine.start(), what=what, on=on, limit_s=limit_s, detail=detail)
        if config.fetch:
            self._fetched = await asyncio.to_thread(self._open_fetched)
        self._http = GenerationHTTP(
            self._engine,
            engine_name=config.engine,
            settings=dataclasses.asdict(config.generation),
            decode_text=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
            verified=self._verified_loads(self._engine),
            receiver=self._engine.weight_receiver(self.info.runtime.host),
            fetched=self._fetched,
            run_dir=self.info.run_dir,
            published=self._published,
        )
        url = await self._http.start(self.info.runtime.host)
        await self.publish(self.names.generation_server(self.info.index), url)
        self.logger.info("serving at %s, without weights yet", url)

    async def run(self) -> None:
        """Housekeeping, once a second.

        Consumes nothing; produces status and journal. Waits for the clock only. Ends with an error when the engine has died.
        """
        assert self._engine is not None
        assert self._journal is not None
        while True:
            stats = self._engine.stats()
            self.board.version = stats.version
            self.board.set_queue("running", stats.running)
            self.board.set_queue("waiting", stats.waiting)
            self.board.progress()
            if (failure := self._engine.failure) is not None:
                why = (str(failure) or repr(failure)).splitlines()[0]
                raise RuntimeError(f"the engine has died: {why}") from failure
            if expired := self._engine.expire_waiting():
                self.logger.warning("%d requests waited too long and were answered 503", expired)
            await asyncio.to_thread(self._journal.flush)
            await asyncio.sleep(FLUSH_INTERVAL_S)

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()  # fails what is in flight, so that the HTTP handlers return
        if self._http is not None:
            await self._http.close()
        if self._journal is not None:
            self._journal.close()
        if self._fetched is not None:
            self._fetched.close()

    async def _published(self) -> WeightVersion | None:
        """The newest version that the trainer has on disk or in memory; None: name resolve has none."""
        found = []
        for key in (self.names.model_version(ACTOR), self.names.weights_held(ACTOR)):
            try:
                found.append(WeightVersion.parse(await asyncio.to_thread(self.resolver.get, key)))
            except NameEntryNotFound:
                continue
            except (NameResolveTimeout, ValueError) as error:
                raise EngineUnavailable(f"which weights are published is not known: {error}") from error
        return max(found, default=None)

    def _open_fetched(self) -> FetchedWeights:
        info = self.info
        run = run_key(info.experiment, info.trial, info.run_dir, info.runtime.host)
        fetcher = WeightFetcher(fetch_folder(self._config.fetch_dir), run, logger=self.logger)
        return FetchedWeights(fetcher, self._source)

    async def _source(self) -> str:
        """Below which the gserver manager serves versions; "" where name resolve does not say it now."""
        try:
            return await asyncio.to_thread(self.resolver.get, self.names.weight_files(ACTOR))
        except (NameEntryNotFound, NameResolveTimeout) as error:
            self.logger.warning("where weights are served is not known: %s", error)
            return ""

    def _verified_loads(self, engine: GenerationEngine) -> VerifiedLoads | None:
        """weights.verify_logprobs: each version loaded must score a probe as the trainer does."""
        tolerance = self._config.verify_tolerance
        limit_s = self._config.generation.load_timeout_s
        return VerifiedLoads(engine, tolerance=tolerance, limit_s=limit_s, logger=self.logger) if tolerance else None

    @contextlib.contextmanager
    def _start_shown(self, engine: GenerationEngine) -> Iterator[tuple[str, str, Callable[[], str]]]:
        """What the start of the engine waits for, on whom, and how far it has come."""
        config = self._config
        if config.engine == "transformers":
            loading = LoadProgress(config.model_path)
            with loading.watched():
                yield "loading the model", config.model_path, loading.text
        elif config.engine == "sglang":
            yield "starting SGLang", config.generation.python or "this environment's", engine.progress
        else:
            yield "an answer of SGLang", config.generation.urls[self.info.index], engine.progress

    def _make_engine(self, journal: TokenJournal, eos_token_id: int | None) -> GenerationEngine:
        """In a thread: importing torch and transformers takes seconds."""
        eos_token_ids = [] if eos_token_id is None else [eos_token_id]
        if self._config.engine == "transformers":
            return self._make_transformers(journal, eos_token_ids)
        return self._make_sglang(journal, eos_token_ids)

    def _make_sglang(self, journal: TokenJournal, eos_token_ids: list[int]) -> GenerationEngine:
        """The engines sglang and external: they differ in whose the server is."""
        from asyncrl.generation.sglang import SGLangEngine
        from asyncrl.generation.sglang_process import AttachedServer, ServerLink, own_server, read_api_key

        config, info = self._config, self.info
        server: ServerLink
        if config.engine == "external":
            server = AttachedServer(config.generation.urls[info.index], read_api_key(config.generation.api_key_file))
        else:
            logs = Path(info.run_dir) / "logs" / f"attempt_{info.attempt}"
            server = own_server(
                config.generation,
                config.model_path,
                tensor=config.tensor_parallel,
                seed=info.seed * 1000 + info.index,
                log=logs / f"{info.kind}_{info.index}_sglang.log",
            )
        return SGLangEngine(
            config.model_path,
            config.generation,
            server,
            eos_token_ids=eos_token_ids,
            on_tokens=journal.add,
            trace=self.trace,
        )

    def _make_transformers(self, journal: TokenJournal, eos_token_ids: list[int]) -> GenerationEngine:
        import torch
        from transformers.utils import logging as transformers_logging

        from asyncrl.generation.transformers import TransformersEngine

        config = self._config
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        if config.torch_threads > 0:
            torch.set_num_threads(config.torch_threads)
        return TransformersEngine(
            config.model_path,
            config.generation,
            seed=self.info.seed * 1000 + self.info.index,
            eos_token_ids=eos_token_ids,
            on_tokens=journal.add,
            trace=self.trace,
        )


def _check_config(config: GenerationServerConfig) -> None:
    """What can be known before anything heavy is imported."""
    if config.engine not in ENGINES:
        raise ValueError(f"engine is {config.engine!r}; known are {', '.join(ENGINES)}")
    if not (Path(config.model_path) / "config.json").is_file():
        raise ValueError(
            f"model_path {config.model_path!r} holds no config.json; give a model directory in Hugging Face format"
        )
