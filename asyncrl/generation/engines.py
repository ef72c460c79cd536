"""Makes the engine that a generation server's config selects. What other code needs to know of an engine: config/engines.py."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from asyncrl.config.engines import traits_of
from asyncrl.config.processes import GenerationServerConfig
from asyncrl.data.prompts import load_tokenizer
from asyncrl.generation.engine import EngineArguments, GenerationEngine
from asyncrl.generation.journal import TokenJournal, journal_path
from asyncrl.runtime.clock import Clock
from asyncrl.runtime.trace import Tracer
from asyncrl.weights.fetch import WeightFetcher, fetch_folder, run_key

logger = logging.getLogger(__name__)


class Engines(ABC):
    """What a generation server needs to start: a journal, a tokenizer, and its engine. Each engine has a subclass.

    Order of calls: `make`, then the engine's `start`. A server that begins asleep does not call it: the engine starts in `wake`.
    """

    def __init__(self, config: GenerationServerConfig, trace: Tracer, clock: Clock) -> None:
        """Raises ValueError for config errors that can be found before torch or transformers are imported."""
        if not (Path(config.model_path) / "config.json").is_file():
            raise ValueError(
                f"model_path {config.model_path!r} has no config.json; give a model directory in Hugging Face format"
            )
        self._config, self._info, self._trace, self._clock = config, config.worker, trace, clock

    def journal(self) -> TokenJournal:
        return TokenJournal(journal_path(self._info.run_dir, self._info.index), now=self._clock.time)

    def tokenizer(self) -> Any:
        return load_tokenizer(self._config.tokenizer_path)

    def make(self, journal: TokenJournal, eos_token_id: int | None) -> GenerationEngine[Any]:
        """Make the engine. Call it in a thread: importing torch and transformers takes seconds."""
        return self._make(
            EngineArguments(
                self._config.model_path,
                self._config.generation,
                eos_token_ids=[] if eos_token_id is None else [eos_token_id],
                on_tokens=journal.add,
                trace=self._trace,
                clock=self._clock,
                asleep=self._config.shares_devices,
                returns_routes=self._config.returns_routes,
                lora=self._config.lora,
                num_versions=self._config.num_versions,
            )
        )

    @abstractmethod
    def _make(self, arguments: EngineArguments) -> GenerationEngine[Any]: ...

    @abstractmethod
    def start_wait(self) -> tuple[str, str]:
        """For a status line about the engine's start: what the server waits for, in words; and the folder, interpreter or URL that
        it waits for."""


class EmbeddedEngines(Engines):
    """transformers computes in this process."""

    def start_wait(self) -> tuple[str, str]:
        return "loading the model", self._config.model_path

    def _make(self, arguments: EngineArguments) -> GenerationEngine[Any]:
        import torch
        from transformers.utils import logging as transformers_logging

        from asyncrl.generation.transformers import TransformersEngine
        from asyncrl.runtime.rank_device import rank_device

        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        if self._config.torch_threads > 0:
            torch.set_num_threads(self._config.torch_threads)
        seed = self._info.seed * 1000 + self._info.index
        return TransformersEngine(arguments, device=rank_device(gpus=self._info.gpus), seed=seed)


class ProgramEngines(Engines):
    """A server of another program that this process starts and owns."""

    def __init__(self, config: GenerationServerConfig, trace: Tracer, clock: Clock) -> None:
        super().__init__(config, trace, clock)
        program = traits_of(config.engine).program
        assert program is not None
        self._program = program

    def start_wait(self) -> tuple[str, str]:
        return f"starting {self._program.name}", self._config.generation.python or "this environment's"

    @property
    def _place(self) -> dict[str, Any]:
        """The arguments of `own_server` that do not depend on the program."""
        info = self._info
        logs = Path(info.run_dir) / "logs" / f"attempt_{info.attempt}"
        return {
            "tensor": self._config.tensor_parallel,
            "gpus": info.gpus,
            "seed": info.seed * 1000 + info.index,
            "log": logs / f"{info.kind}_{info.index}_{self._program.package}.log",
            "clock": self._clock,
        }

    def _writer(self) -> WeightFetcher | None:
        """Writes versions in full, because the program loads no others. None: all versions are full."""
        config, info = self._config, self._info
        if config.full_every <= 1:
            return None
        run = run_key(info.experiment, info.trial, info.run_dir, info.runtime.host) + "-full"
        return WeightFetcher(fetch_folder(config.fetch_dir), run, keep=1, logger=logger, clock=self._clock)


class SGLangEngines(ProgramEngines):
    def _make(self, arguments: EngineArguments) -> GenerationEngine[Any]:
        from asyncrl.generation.sglang import SGLangEngine
        from asyncrl.generation.sglang_process import own_server

        config = self._config
        server = own_server(
            config.generation,
            config.model_path,
            sleeps=config.shares_devices,
            returns_routes=config.returns_routes,
            **self._place,
        )
        return SGLangEngine(arguments, server, self._writer())


class VLLMEngines(ProgramEngines):
    def _make(self, arguments: EngineArguments) -> GenerationEngine[Any]:
        from asyncrl.generation.vllm import VLLMEngine, own_server

        server = own_server(
            self._config.generation,
            self._config.model_path,
            lora=self._config.lora,
            num_versions=self._config.num_versions,
            **self._place,
        )
        return VLLMEngine(arguments, server, self._writer())


class ExternalEngines(Engines):
    """A SGLang server that another program runs."""

    def start_wait(self) -> tuple[str, str]:
        return "an answer of SGLang", self._config.generation.urls[self._info.index]

    def _make(self, arguments: EngineArguments) -> GenerationEngine[Any]:
        from asyncrl.generation.sglang import SGLangEngine
        from asyncrl.generation.sglang_process import AttachedServer, read_api_key

        generation = self._config.generation
        url, api_key = generation.urls[self._info.index], read_api_key(generation.api_key_file)
        return SGLangEngine(arguments, AttachedServer(url, api_key, clock=self._clock))


KINDS: dict[str, type[Engines]] = {
    "transformers": EmbeddedEngines,
    "sglang": SGLangEngines,
    "vllm": VLLMEngines,
    "external": ExternalEngines,
}


def engines_of(config: GenerationServerConfig, trace: Tracer, clock: Clock) -> Engines:
    """The maker of the config's engine. Raises ValueError, as its constructor does."""
    if config.engine not in KINDS:
        raise ValueError(f"engine is {config.engine!r}; known are {', '.join(KINDS)}")
    return KINDS[config.engine](config, trace, clock)
