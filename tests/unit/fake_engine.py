"""An engine in one file: its traits, its class, and the class that makes it. test_engines.py adds its rows."""

from __future__ import annotations

from typing import Any

from asyncrl.config.engines import EngineTraits
from asyncrl.generation.engine import EngineArguments, GenerationEngine
from asyncrl.generation.engines import Engines
from tests.support.paced_engine import LongTail, PacedEngine

TRAITS = EngineTraits(
    starts_servers=True, is_tensor_parallel=True, settings=("server_args",), grid_limit="has no stages"
)


class FakeEngines(Engines):
    def start_wait(self) -> tuple[str, str]:
        return "starting the fake", self._config.model_path

    def _make(self, arguments: EngineArguments) -> GenerationEngine[Any]:
        tail = LongTail(seed=1, prompt_tokens=3)
        return PacedEngine(tail, arguments.config, tokens_per_s=200.0, on_tokens=arguments.on_tokens)
