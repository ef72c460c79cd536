"""GenerationServer: the process that samples. Owns one engine and serves it over HTTP.

In: prompts (POST /generate, from rollout workers); weight versions on disk (POST /update_weights_from_disk, from the gserver
manager). Out: tokens, logprobs and the version that sampled them. It starts without a version and generates nothing until the
manager has had it load one. The address is published once the socket is bound.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

from asyncrl.config import GenerationServerConfig
from asyncrl.data.prompts import load_tokenizer
from asyncrl.generation.engine import GenerationEngine
from asyncrl.generation.http import GenerationHTTP
from asyncrl.generation.journal import FLUSH_INTERVAL_S, TokenJournal, journal_path
from asyncrl.runtime.loading import LoadProgress
from asyncrl.runtime.worker import Worker
from asyncrl.topology import ENGINES


class GenerationServer(Worker):
    """A generation server. Its event loop serves HTTP; the engine computes on a thread of its own."""

    def __init__(self, config: GenerationServerConfig) -> None:
        _check_config(config)
        super().__init__(config.worker)
        self._config = config
        self._engine: GenerationEngine | None = None
        self._http: GenerationHTTP | None = None
        self._journal: TokenJournal | None = None

    async def setup(self) -> None:
        config = self._config
        self._journal = TokenJournal(journal_path(self.info.run_dir, self.info.index))
        tokenizer = await asyncio.to_thread(load_tokenizer, config.tokenizer_path)
        self._engine = await asyncio.to_thread(self._make_engine, self._journal, tokenizer.eos_token_id)
        self.logger.info("loading the model")
        loading = LoadProgress(config.model_path)
        with loading.watched():
            await self.board.bounded(
                self._engine.start(),
                what="loading the model",
                on=config.model_path,
                limit_s=config.generation.load_timeout_s,
                detail=loading.text,
            )
        self._http = GenerationHTTP(
            self._engine,
            engine_name=config.engine,
            settings=dataclasses.asdict(config.generation),
            decode_text=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
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
            if self._engine.failure is not None:
                raise RuntimeError("the engine has died; the server must be restarted") from self._engine.failure
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

    def _make_engine(self, journal: TokenJournal, eos_token_id: int | None) -> GenerationEngine:
        """In a thread: importing torch and transformers takes seconds."""
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
            eos_token_ids=[] if eos_token_id is None else [eos_token_id],
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
