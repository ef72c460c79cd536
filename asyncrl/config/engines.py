"""The engines of generation servers: everything that code outside `asyncrl/generation` needs to know about them (pure).

That code asks for a trait and never compares the name of an engine. `asyncrl/generation/engines.py` has a row for each engine, too:
the class that makes it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerProgram:
    """A program that serves a model. Each server of the engine starts one, from the environment of generation.python."""

    name: str
    package: str
    tested: str  # the version with which asyncrl is tested
    script: str  # makes its environment

    @property
    def setup_hint(self) -> str:
        return (
            f"create {self.name}'s environment with `bash {self.script}` (--cpu without a GPU), and set generation.python to the "
            "interpreter that it prints"
        )


SGLANG_PROGRAM = ServerProgram("SGLang", "sglang", "0.5.23", "launcher/setup_sglang.sh")
VLLM_PROGRAM = ServerProgram("vLLM", "vllm", "0.32.0", "launcher/setup_vllm.sh")


@dataclass(frozen=True)
class EngineTraits:
    """The defaults are the traits of a run without generation servers."""

    starts_servers: bool = False  # False: other programs run its servers, and asyncrl only connects to them
    # It computes in the generation server's process, with the trainer's code for the model: in float32 both compute the same
    is_embedded: bool = False
    program: ServerProgram | None = None  # it drives this program's servers
    needs_gpu: bool = False
    is_tensor_parallel: bool = False  # a server may have several ranks
    sizes_own_cache: bool = False  # its KV cache takes the memory that is free on the GPU; False: generation.num_blocks
    scores_in_place: bool = True  # it scores texts while its requests are paused in place
    memory_share: float = 0.0  # share of a GPU that it takes by default (gpu-memory-utilization); 0: SGLang's own rule
    rank_bytes: int = 0  # main memory of the processes that it starts for each of its ranks
    # Requests of several versions of an adapter may run at once (generation.interrupt=finish)
    keeps_versions: bool = False
    settings: tuple[str, ...] = ()  # fields of `generation` that other engines refuse
    grid_limit: str = ""  # why it refuses other grids
    routes_limit: str = ""  # why it cannot return the experts of each token (train.routes); "": it can
    delta_limit: str = ""  # why it cannot load deltas; "": it can
    network_limit: str = ""  # why it cannot receive weights over the network; "": it can
    adapter_limit: str = ""  # why it serves no adapters (train.lora); "": it does
    adapter_ranks: tuple[int, ...] = ()  # for which it can reserve room, and so the largest rank of an adapter; (): all
    filter_limit: str = ""  # why it cannot sample with top-p or top-k; "": it can
    cpu_heads: tuple[int, ...] = ()  # widths of attention heads that it has on a CPU; (): all
    cpu_tied_limit: str = ""  # why it cannot serve a model with tied embeddings on a CPU; "": it can

    def adapter_rank(self, rank: int) -> int:
        """The rank for which it reserves room if an adapter has this one."""
        return min((one for one in self.adapter_ranks if one >= rank), default=rank)

    def adapter_slots(self, num_versions: int) -> int:
        """Adapters that it holds at once if it keeps this many: of several, the newest is loaded before the oldest leaves."""
        return num_versions + 1 if num_versions > 1 else 1


_NO_ADAPTERS = "SGLang's adapters were not compared with peft's"
DEFAULT_ENGINE = "transformers"
# Allocations name the engine, as in `sglang.d2p1m1+d2p1m1`
ENGINES = {
    "transformers": EngineTraits(
        starts_servers=True,
        is_embedded=True,
        keeps_versions=True,
        grid_limit="runs data parallel only",
    ),
    "sglang": EngineTraits(
        starts_servers=True,
        program=SGLANG_PROGRAM,
        needs_gpu=True,
        is_tensor_parallel=True,
        sizes_own_cache=True,
        scores_in_place=False,
        rank_bytes=2 << 30,  # measured, front end included, rounded up
        settings=("server_args",),
        grid_limit="has no pipeline stages",
        adapter_limit=_NO_ADAPTERS,
    ),
    "vllm": EngineTraits(
        starts_servers=True,
        program=VLLM_PROGRAM,
        needs_gpu=True,
        is_tensor_parallel=True,
        sizes_own_cache=True,
        scores_in_place=False,
        memory_share=0.92,
        rank_bytes=2 << 30,  # measured, front end included, rounded up
        settings=("server_args",),
        keeps_versions=True,
        grid_limit="has no pipeline stages",
        routes_limit="vLLM returns experts only with Triton and a prefix cache, which was not compared with the trainer",
        network_limit="vLLM's own transfer of weights needs GPUs, on which it has not been run with asyncrl",
        adapter_ranks=(1, 8, 16, 32, 64, 128, 256, 320, 512),
        filter_limit="vLLM's logprobs would be renormalised among the tokens that a filter keeps",
        cpu_heads=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
        cpu_tied_limit="on a CPU vLLM keeps a packed copy of the output layer, which a load of tied weights does not renew",
    ),
    "external": EngineTraits(
        scores_in_place=False,
        settings=("urls", "api_key_file"),
        grid_limit="keeps the parallelism that it was started with",
        routes_limit="an external SGLang server may have been started without --enable-return-routed-experts",
        adapter_limit=_NO_ADAPTERS,
        delta_limit="an external SGLang server may not see this host's folders, to which deltas would be written in full",
    ),
}


def traits_of(engine: str) -> EngineTraits:
    """The traits of an engine, also of `""`: the run has no generation servers."""
    return ENGINES[engine] if engine else EngineTraits()
