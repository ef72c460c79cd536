"""SGLang's server: its command line and environment, and a server that another program runs (AttachedServer)."""

from __future__ import annotations

import asyncio
import os
import secrets as random_secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncrl.config.engines import SGLANG_PROGRAM
from asyncrl.config.schema import ConfigError, GenerationConfig
from asyncrl.data.model_limits import UNLIMITED, ModelLimits
from asyncrl.generation.server_process import (
    LOOPBACK,
    POLL_S,
    IsReady,
    ServerCommand,
    ServerLink,
    ServerProcess,
    options,
    program_environment,
)
from asyncrl.runtime import security
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock
from asyncrl.runtime.devices import usable_cores, visible_devices

SPARE_POSITIONS = 8  # SGLang reserves up to 6 positions of the context for prompts, and up to 2 for prompt and response
SGLANG = ServerCommand(
    SGLANG_PROGRAM,
    "sglang.launch_server",
    own_processes="sglang::",
    shared_memory=("sglang_loads_", "sgl_shm_"),  # load of its schedulers, messages between its ranks
)
_KEY_BYTES = 32


def own_server(
    config: GenerationConfig,
    model_path: str,
    *,
    tensor: int,
    seed: int,
    log: Path,
    gpus: Sequence[str] = (),
    clock: Clock = SYSTEM_CLOCK,
    sleeps: bool = False,
    returns_routes: bool = False,
) -> ServerProcess:
    """Make a server for this model without starting it. It runs on the GPUs that this process may use. It runs on the CPU if there
    are none, or if generation.server_args.device is cpu. gpus: those that the launcher gave this process; with them it never runs
    on the CPU by itself. sleeps: on a GPU the server can release its memory. returns_routes: its answers have the experts
    of each token."""
    api_key = random_secrets.token_hex(_KEY_BYTES) if security.current() is not None else ""
    if api_key and "config" in config.server_args:
        raise ConfigError(
            f"generation.server_args.config={config.server_args['config']!r}: SGLang reads only one config file, and with "
            "authentication that is the file with its API key; move the settings of your file to generation.server_args"
        )
    python = str(Path(config.python or sys.executable).expanduser().absolute())
    device = config.server_args.get("device")  # unset: use GPUs if there are any
    on_gpu = device != "cpu" if device else bool(gpus or visible_devices())
    max_length = ModelLimits.of(model_path).max_length
    return ServerProcess(
        SGLANG,
        python=python,
        arguments=lambda port: server_arguments(
            config,
            model_path,
            port=port,
            tensor=tensor,
            seed=seed,
            max_length=max_length,
            on_gpu=on_gpu,
            sleeps=sleeps,
            returns_routes=returns_routes,
        ),
        environment=lambda tmp: server_environment(os.environ, python=python, tmp=tmp, tensor=tensor, on_gpu=on_gpu),
        log=log,
        on_gpu=on_gpu,
        can_sleep=sleeps and on_gpu,
        api_key=api_key,
        clock=clock,
    )


def server_arguments(
    config: GenerationConfig,
    model_path: str,
    *,
    port: int,
    tensor: int,
    seed: int,
    max_length: int,
    on_gpu: bool,
    sleeps: bool = False,
    returns_routes: bool = False,
) -> list[str]:
    """The arguments of sglang.launch_server. generation.server_args override them.

    The weights in model_path are never loaded. All served weights come from an update, which has verified them.
    """
    arguments = {
        "model-path": model_path,
        "load-format": "dummy",
        "host": LOOPBACK,
        "port": str(port),
        "tp-size": str(tensor),
        "dtype": config.dtype,
        "random-seed": str(seed),
        "max-running-requests": str(config.max_running_requests),
        "skip-tokenizer-init": "true",  # requests and responses are token ids; SGLang never needs text
        "skip-server-warmup": "true",
        "incremental-streaming-output": "true",  # otherwise each piece of a response repeats all earlier ones
        "log-level-http": "warning",
    }
    if max_length < UNLIMITED:
        arguments["context-length"] = str(max_length + SPARE_POSITIONS)
    if not on_gpu:
        arguments |= {
            "device": "cpu",
            "attention-backend": "torch_native",
            "max-total-tokens": str(config.num_blocks * config.page_size),
            "mem-fraction-static": "0.1",
            "grammar-backend": "none",
            "disable-overlap-schedule": "true",
            "sleep-on-idle": "true",  # otherwise an idle scheduler keeps a core busy
        }
    else:
        # SGLang's own limit is 256 on an H100. A larger batch would decode without CUDA graphs, at a fraction of the speed
        arguments["cuda-graph-max-bs-decode"] = str(config.max_running_requests)
        if sleeps:
            arguments["enable-memory-saver"] = "true"  # a CPU has no memory saver: a release frees nothing there
    if config.interrupt == "in_place":
        # Requests continue across an update. The overlap scheduler would label the first token after the update with the new
        # version, although the old weights sampled it. A prefix cache would keep keys of the old weights for later requests.
        arguments |= {"disable-overlap-schedule": "true", "disable-radix-cache": "true"}
    if not config.prefix_sharing or returns_routes:
        arguments["disable-radix-cache"] = "true"
    if returns_routes:
        arguments["enable-return-routed-experts"] = "true"
    return options(arguments, config.server_args)


def server_environment(base: Mapping[str, str], *, python: str, tmp: str, tensor: int, on_gpu: bool) -> dict[str, str]:
    """The environment of SGLang's process."""
    environment = program_environment(base, python=python, tmp=tmp)
    for name in ("NO_PROXY", "no_proxy"):  # SGLang asks itself by HTTP whether it has started
        environment[name] = ",".join(filter(None, [base.get(name), "127.0.0.1", "localhost"]))
    environment |= {
        # Otherwise /health generates a token, and takes seconds while SGLang is paused
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        # context-length exceeds the model's limit by SPARE_POSITIONS; no request uses these positions
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "SGLANG_FORCE_SHUTDOWN": "1",  # on SIGTERM SGLang ends without waiting for its requests
    }
    if not on_gpu:
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment.setdefault("OMP_NUM_THREADS", "1")
        if tensor > 1:
            environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", cores_of_ranks(usable_cores(), tensor))
    return environment


def cores_of_ranks(cores: Sequence[int], ranks: int) -> str:
    """Cores of each tensor-parallel rank in SGLang's format, `0,1|2,3`. If there are fewer cores than ranks, ranks share them."""
    if len(cores) < ranks:
        return "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    size = len(cores) // ranks
    return "|".join(",".join(map(str, cores[rank * size : (rank + 1) * size])) for rank in range(ranks))


def read_api_key(path: str) -> str:
    """Read the API key from a file that contains only the key; "" for an empty path. Raises ConfigError."""
    if not path:
        return ""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"generation.api_key_file={path!r} cannot be read: {error}") from error


class AttachedServer(ServerLink):
    """A server at a URL that another program runs. This class neither starts nor stops it."""

    def __init__(self, url: str, api_key: str = "", *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.url, self.api_key, self._clock = url.rstrip("/"), api_key, clock

    async def start(self, is_ready: IsReady, limit_s: float) -> None:
        deadline = self._clock.monotonic() + limit_s
        while not await is_ready(self.url):
            if self._clock.monotonic() > deadline:
                raise ConfigError(
                    f"generation.urls: no SGLang server answers at {self.url} within {limit_s:g} s (generation.load_timeout_s); "
                    "start it there, or correct the URL"
                )
            await asyncio.sleep(POLL_S)

    def log_text(self) -> str:
        return f"this run does not own the SGLang server at {self.url}: see its log on that host"
