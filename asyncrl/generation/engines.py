"""Makes the engine that a generation server's config selects."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from asyncrl.config.processes import GenerationServerConfig
from asyncrl.data.prompts import load_tokenizer
from asyncrl.dataflow.topology import ENGINES
from asyncrl.generation.engine import GenerationEngine
from asyncrl.generation.journal import TokenJournal, journal_path
from asyncrl.generation.queueing import EngineArguments
from asyncrl.runtime.clock import Clock
from asyncrl.runtime.loading import LoadProgress
from asyncrl.runtime.trace import Tracer
from asyncrl.weights.fetch import WeightFetcher, fetch_folder, run_key

logger = logging.getLogger(__name__)


class Engines:
    """Makes one of three engines.

    transformers computes in this process; sglang is a SGLang server that this process starts and owns; external is a SGLang server
    that another program runs.
    """

    def __init__(self, config: GenerationServerConfig, trace: Tracer, clock: Clock) -> None:
        """Raises ValueError for config errors that can be found before torch or transformers are imported."""
        if config.engine not in ENGINES:
            raise ValueError(f"engine is {config.engine!r}; known are {', '.join(ENGINES)}")
        if not (Path(config.model_path) / "config.json").is_file():
            raise ValueError(
                f"model_path {config.model_path!r} has no config.json; give a model directory in Hugging Face format"
            )
        self._config, self._info, self._trace, self._clock = config, config.worker, trace, clock

    def journal(self) -> TokenJournal:
        return TokenJournal(journal_path(self._info.run_dir, self._info.index), now=self._clock.time)

    def tokenizer(self) -> Any:
        return load_tokenizer(self._config.tokenizer_path)

    @contextlib.contextmanager
    def starting(self, engine: GenerationEngine) -> Iterator[tuple[str, str, Callable[[], str]]]:
        """Yield three things for a status line about the engine's start: what the server waits for, in words; the folder,
        interpreter or URL that it waits for; and a function that returns the progress as text."""
        config = self._config
        if config.engine == "transformers":
            loading = LoadProgress(config.model_path)
            with loading.watched():
                yield "loading the model", config.model_path, loading.text
        elif config.engine == "sglang":
            yield "starting SGLang", config.generation.python or "this environment's", engine.progress
        else:
            yield "an answer of SGLang", config.generation.urls[self._info.index], engine.progress

    def make(self, journal: TokenJournal, eos_token_id: int | None) -> GenerationEngine:
        """Make the engine. Call it in a thread: importing torch and transformers takes seconds."""
        arguments = EngineArguments(
            self._config.model_path,
            self._config.generation,
            eos_token_ids=[] if eos_token_id is None else [eos_token_id],
            on_tokens=journal.add,
            trace=self._trace,
            clock=self._clock,
            asleep=self._config.shares_devices,
        )
        if self._config.engine == "transformers":
            return self._make_transformers(arguments)
        return self._make_sglang(arguments)

    def _make_sglang(self, arguments: EngineArguments) -> GenerationEngine:
        """Make the engine sglang or external. They differ only in which program runs the SGLang server."""
        from asyncrl.generation.sglang import SGLangEngine
        from asyncrl.generation.sglang_process import AttachedServer, ServerLink, own_server, read_api_key

        config, info = self._config, self._info
        server: ServerLink
        local = None
        if config.engine == "external":
            api_key = read_api_key(config.generation.api_key_file)
            server = AttachedServer(config.generation.urls[info.index], api_key, clock=self._clock)
        else:
            logs = Path(info.run_dir) / "logs" / f"attempt_{info.attempt}"
            server = own_server(
                config.generation,
                config.model_path,
                tensor=config.tensor_parallel,
                seed=info.seed * 1000 + info.index,
                log=logs / f"{info.kind}_{info.index}_sglang.log",
                clock=self._clock,
                sleeps=config.shares_devices,
            )
            if config.full_every > 1:
                run = run_key(info.experiment, info.trial, info.run_dir, info.runtime.host) + "-full"
                local = WeightFetcher(fetch_folder(config.fetch_dir), run, keep=1, logger=logger, clock=self._clock)
        return SGLangEngine(arguments, server, local)

    def _make_transformers(self, arguments: EngineArguments) -> GenerationEngine:
        import torch
        from transformers.utils import logging as transformers_logging

        from asyncrl.generation.transformers import TransformersEngine

        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        if self._config.torch_threads > 0:
            torch.set_num_threads(self._config.torch_threads)
        return TransformersEngine(arguments, seed=self._info.seed * 1000 + self._info.index)
