"""The embedded engine: Hugging Face transformers' continuous batching, on CPU or GPU.

It uses three threads. The server's event loop owns the queue and makes all decisions. The generation thread (transformers' manager)
runs one forward pass after another. The control thread pauses the manager between two passes to collect interrupted requests, to
change the weights or to score a text. Requests reach the generation thread through the manager's queue; results return through one
callback per pass.

Our additions to transformers' manager, each in a class below:
- `_Router`: passes all results of a pass to the event loop in one call;
- `_SamplingArgs` and `_Runner`: sampling parameters per request (transformers 5.23 takes processors per request, but one
  do_sample for all, and gives logprobs after top-p/top-k renormalisation);
- padded_attention.py, unless the config names another implementation;
- adapter_versions.py: with generation.interrupt=finish, requests of several versions of an adapter in one pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import AutoConfig, ContinuousBatchingConfig
from transformers import GenerationConfig as SamplingDefaults
from transformers.generation.continuous_batching.cache import group_layers_by_attn_type
from transformers.generation.continuous_batching.cache_allocators import SLIDING_ATTENTION
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
    OutputRouter,
)
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.scheduler import Scheduler
from transformers.generation.continuous_batching.utils import find_head_dim, find_num_key_value_heads

from asyncrl.architectures.adapters import Adapters, add_adapters
from asyncrl.architectures.attention import LayerAttention, Pattern, read_attention
from asyncrl.architectures.auto_class import auto_class
from asyncrl.architectures.checkpoint_names import Place, places_of
from asyncrl.architectures.small_copy import longest_window
from asyncrl.architectures.towers import drop_towers
from asyncrl.config.schema import ConfigError, GenerationConfig
from asyncrl.data.model_folder import check_shards
from asyncrl.data.routes import Routes
from asyncrl.generation import padded_attention
from asyncrl.generation.adapter_versions import AdapterVersions, NewAdapter, name_versions
from asyncrl.generation.checks import TensorSpec, check_params, check_prompt, check_sent, check_tensors, specs_of
from asyncrl.generation.engine import (
    CLOSING,
    EngineArguments,
    EngineFailed,
    EngineRequest,
    EngineUnavailable,
    Generated,
    GenerationEngine,
    Pending,
    RequestRefused,
    WeightReceiver,
    WeightsRefused,
)
from asyncrl.generation.receive import StagedReceiver
from asyncrl.generation.routes import RequestRoutes
from asyncrl.generation.self_check import check_decoding, check_small_copy, prompt_lengths
from asyncrl.generation.states import RequestStates, Row
from asyncrl.protocol.errors import ErrorClass, classify
from asyncrl.protocol.generation import FinishReason, SamplingParams
from asyncrl.protocol.versions import WeightVersion
from asyncrl.protocol.weight_updates import TensorSpecs
from asyncrl.runtime.loading import LoadProgress
from asyncrl.runtime.process import return_freed_memory
from asyncrl.runtime.rank_device import rank_device
from asyncrl.runtime.trace import Tracer
from asyncrl.weights import versions as weights
from asyncrl.weights.adapter import check_about
from asyncrl.weights.form import WeightsError
from asyncrl.weights.forms import FORMS
from asyncrl.weights.versions import VerifiedVersion

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FEWER_TOKENS = 6  # by at most so many tokens `scoring_noise` shortens a text
_STOP_TIMEOUT_S = 8.0
_ALIGNMENT = 64  # bytes; torch's alignment of newly allocated CPU tensors
# Without cuDNN, which torch prefers on some GPUs: it builds a plan for each new shape, and each pass has new shapes
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


# ----------------------------------------------------------------------------------------------- sampling, per request


class _SamplingArgs:
    """Carries each request's sampling parameters to the forward pass. It takes the place of the manager's logits processors.

    Rows of the manager's storage: 0 temperature (float32 as int32 bits; 0 means greedy), 1 top_p (float32 as int32 bits), 2 top_k.
    """

    tensors_required = 3
    do_processing = True

    def __init__(self) -> None:
        self.needs_sorting = False  # whether any request of the next pass uses top-p or top-k

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Part of the manager's interface. No check is needed here: `submit` has already raised RequestRefused."""

    def fill_defaults(self, storage: Tensor) -> None:
        storage[0] = torch.tensor(1.0).view(torch.int32)
        storage[1] = torch.tensor(1.0).view(torch.int32)
        storage[2].zero_()

    def prepare_tensor_args(self, requests_in_batch: Iterable[Any], arg_storage: Tensor) -> Tensor:
        rows = [item.state.logit_processor_kwargs["sampling"] for item in requests_in_batch if item.has_new_token]
        self.needs_sorting = any(top_p < 1.0 or top_k > 0 for _, top_p, top_k in rows)
        if rows:
            values = torch.tensor(rows, dtype=torch.float32)
            arg_storage[0, : len(rows)] = values[:, 0].contiguous().view(torch.int32)
            arg_storage[1, : len(rows)] = values[:, 1].contiguous().view(torch.int32)
            arg_storage[2, : len(rows)] = values[:, 2].to(torch.int32)
        return arg_storage


def sample_tokens(
    logits_NV: Tensor, temperature_N: Tensor, top_p_N: Tensor, top_k_N: Tensor, *, needs_sorting: bool
) -> tuple[Tensor, Tensor]:
    """Sample one token per row. Returns tokens and their logprobs after temperature, before top-p and top-k. Temperature 0: greedy.

    Sampling uses the Gumbel trick, argmax(logprob - log(q)) with q ~ Exp(1). Unlike torch.multinomial it does not raise on
    logits that are not finite, so one broken model version cannot stop the engine; the logprob, not finite either, shows the error.
    """
    greedy_N = temperature_N == 0
    logprobs_NV = torch.log_softmax(logits_NV / temperature_N.masked_fill(greedy_N, 1.0).unsqueeze(1), dim=-1)
    scores_NV = logprobs_NV
    if needs_sorting:
        sorted_NV, order_NV = logprobs_NV.sort(dim=-1, descending=True)
        rank_V = torch.arange(sorted_NV.shape[1], device=sorted_NV.device)
        sorted_NV = sorted_NV.masked_fill((top_k_N.unsqueeze(1) > 0) & (rank_V >= top_k_N.unsqueeze(1)), -torch.inf)
        probs_NV = sorted_NV.softmax(dim=-1)
        before_NV = probs_NV.cumsum(dim=-1) - probs_NV  # total probability of more likely tokens
        sorted_NV = sorted_NV.masked_fill((before_NV >= top_p_N.unsqueeze(1)) & (rank_V > 0), -torch.inf)
        scores_NV = torch.empty_like(logprobs_NV).scatter_(1, order_NV, sorted_NV)
    noise_NV = torch.empty_like(scores_NV).exponential_().log_()
    noise_NV.masked_fill_(greedy_N.unsqueeze(1), 0.0)
    tokens_N = (scores_NV - noise_NV).argmax(dim=-1)
    return tokens_N, logprobs_NV.gather(1, tokens_N.unsqueeze(1)).squeeze(1)


class _Runner(ModelRunner):
    """Forward pass with our attention plan and our sampling."""

    sampling_args: _SamplingArgs
    # Of layers in the KV cache; empty: padded_attention.py is not used, or the model has no attention
    places: dict[int, int]
    states: RequestStates
    routes: RequestRoutes | None
    versions: AdapterVersions | None  # None: all requests are of the version in the model's layers
    scheduler: Scheduler

    def compute_batch(self, model: Any, batch_data: Any) -> None:
        """transformers writes the inputs of a pass on the thread's stream, and runs the pass on a stream of its own. Without this
        wait, which transformers lacks, a pass can read the inputs of the pass before."""
        if (stream := self.inputs_and_outputs.compute_stream) is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        super().compute_batch(model, batch_data)

    def _forward_process_and_sample(
        self,
        model: Any,
        batch_data: dict[str, Any],
        carry_over_ids: Tensor,
        prev_output_ids: Tensor,
        output_ids: Tensor,
    ) -> None:
        if self.places:
            self._plan_attention(batch_data)
        num_tokens = batch_data["input_ids"].numel()
        batch_data = on_device(batch_data, model.device)
        states = self.states.of_pass(*self._rows()) if self.states.names else contextlib.nullcontext()
        routes = self.routes.of_pass(*self._rows()) if self.routes is not None else contextlib.nullcontext()
        versions = (
            self.versions.of_pass(self._rows()[0], num_tokens)
            if self.versions is not None
            else contextlib.nullcontext()
        )
        with sdpa_kernel(_KERNELS), states, routes, versions:
            logits_NV = model(**batch_data).logits[0]
        if "logits_to_keep" not in batch_data:
            logits_NV = logits_NV[batch_data["logits_indices"]]
        args = batch_data["logits_processor_args"]
        tokens_N, logprobs_N = sample_tokens(
            logits_NV.float(),
            args[0].view(torch.float32),
            args[1].view(torch.float32),
            args[2],
            needs_sorting=self.sampling_args.needs_sorting,
        )
        num_rows = tokens_N.shape[0]
        results = (
            output_ids if output_ids.device == tokens_N.device else torch.empty_like(output_ids, device=tokens_N.device)
        )
        results[0, :num_rows].copy_(tokens_N)
        results[1, :num_rows].copy_(logprobs_N.view(torch.int32))  # the manager reads row 1 back as float32
        if results is not output_ids:
            output_ids.copy_(results, non_blocking=True)  # the manager reads it after the end of the pass

    def _rows(self) -> tuple[list[Row], set[str]]:
        """The tokens of the pass, and the keys of all requests that are not done."""
        batch: list[Any] = self.inputs_and_outputs.requests_in_batch  # type: ignore[union-attr]
        rows = [
            # prepare_batch_tensors has added this pass's queries to the offset
            Row(
                item.state.request_id,
                item.state.position_offset - item.query_length,
                item.query_length,
                item.state.logit_processor_kwargs["version"],
            )
            for item in batch
        ]
        return rows, {*self.scheduler.active_requests, *self.scheduler.waiting_requests}

    def _plan_attention(self, batch_data: dict[str, Any]) -> None:
        batch: list[Any] = self.inputs_and_outputs.requests_in_batch  # type: ignore[union-attr]
        # A pass with only new prompts has no rows to read: it attends only to the rows that it writes.
        packed = batch_data["read_index"][0] if batch_data["read_index"][0].numel() else batch_data["write_index"][0]
        (allocator,) = self.cache.cache_allocators.values()
        plan = padded_attention.make_plan(
            [item.query_length for item in batch],
            [item.state.position_offset for item in batch],  # prepare_batch_tensors has added this pass's queries
            packed.numpy(),
            allocator.read_trash_index,
            self.places,
        )
        batch_data["read_index"] = [plan.read_index]
        batch_data["attention_plan"] = plan


def on_device(tree: Any, device: torch.device) -> Any:
    """The tree with all its tensors on this device. Those on the host travel in one copy, from pinned memory, without a wait."""
    if device.type == "cpu":
        return tree
    leaves, spec = tree_flatten(tree)
    host = {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.device != device}
    if not host:
        return tree
    ends = list(itertools.accumulate(-(-leaf.nbytes // _ALIGNMENT) * _ALIGNMENT for leaf in host.values()))
    packed = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    sent = torch.empty_like(packed, device=device)
    for (index, leaf), start in zip(host.items(), [0, *ends], strict=False):
        here, there = (flat[start : start + leaf.nbytes].view(leaf.dtype).view(leaf.shape) for flat in (packed, sent))
        here.copy_(leaf)
        leaves[index] = there
    sent.copy_(packed, non_blocking=True)
    return tree_unflatten(leaves, spec)


class _Router(OutputRouter):
    """Passes all results of a pass to the event loop in one call."""

    def __init__(
        self,
        deliver: Callable[[list[tuple[Any, Routes | None]]], None],
        loop: asyncio.AbstractEventLoop,
        routes: RequestRoutes | None,
    ) -> None:
        super().__init__()
        self._deliver_on_loop, self._loop, self._routes = deliver, loop, routes

    def deliver(self, output: Any) -> None:
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[Any]) -> None:
        if not self._loop.is_closed():
            results = [(output, self._routes.take(output.request_id) if self._routes else None) for output in outputs]
            self._loop.call_soon_threadsafe(self._deliver_on_loop, results)


class _Manager(ContinuousBatchingManager):
    """transformers' manager with the parts above. Its thread runs `_generation_step` for every pass."""

    def __init__(
        self,
        model: Any,
        config: ContinuousBatchingConfig,
        *,
        padded: Sequence[LayerAttention] | None,
        states: RequestStates,
        routes: RequestRoutes | None,
        versions: AdapterVersions | None,
        on_pass: Callable[[Mapping[WeightVersion | None, int]], None],
        trace: Tracer,
    ) -> None:
        """padded: the model's attention layers; None: another implementation than padded_attention.py is used."""
        self._padded, self._on_pass, self._trace = padded, on_pass, trace
        self._states, self._routes, self._versions = states, routes, versions
        with _full_attention(model.config.get_text_config(), padded):
            super().__init__(model, SamplingDefaults(do_sample=True, eos_token_id=-1), config)  # type: ignore[no-untyped-call]
        self._sampling_args = _SamplingArgs()
        self.logit_processor = self._sampling_args  # type: ignore[assignment]

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        # transformers would replace our padded attention, which is not in its list of paged implementations
        if self._padded is None:
            super().switch_to_cb_friendly_attn(model, auto_switch_to_flash)

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        is_new = self.batch_processor is None
        with _full_attention(self.model.config.get_text_config(), self._padded):
            processor = super()._create_batch_processor()
        if is_new:
            runner = _Runner(
                logit_processor=self.logit_processor,
                cb_config=processor.cb_config,
                cache=processor.cache,
                inputs_and_outputs=processor.inputs_and_outputs,
                do_sample=True,
                return_logprobs=True,
            )
            runner.sampling_args = self._sampling_args
            runner.places = {layer.layer: place for place, layer in enumerate(self._padded or ())}
            runner.states, runner.routes, runner.scheduler = self._states, self._routes, processor.scheduler
            runner.versions = self._versions
            if self._versions is not None:
                name_versions(processor.cache, partial(_version_of, processor.scheduler))
            processor.model_runner = runner
            if self._padded is not None:
                # Keep the inputs and outputs of a pass on the host: transformers would copy each of them to the device on its own
                inputs: Any = processor.inputs_and_outputs
                inputs.device = torch.device("cpu")
                inputs._setup_static_tensors(self.logit_processor)
                inputs._reset_static_tensors(full_reset=True)
        return processor

    @property
    def processor(self) -> ContinuousBatchProcessor:
        assert self.batch_processor is not None
        return self.batch_processor

    def prepare(self) -> None:
        """Allocate the KV cache in the calling thread, so that a failure is raised to the caller."""
        self.batch_processor = self._create_batch_processor()

    def _generation_step(self) -> None:
        began_us = self._trace.now_us()
        with torch.inference_mode():
            super()._generation_step()
        batch: Any = self.processor.inputs_and_outputs
        num_new_tokens = Counter(
            item.state.logit_processor_kwargs["version"] for item in batch.requests_in_batch if item.has_new_token
        )
        self._on_pass(num_new_tokens)
        self._trace.add_span(
            "forward", began_us, track="engine", new_tokens=num_new_tokens.total(), tokens=batch.num_q_tokens
        )


def _version_of(scheduler: Scheduler, key: str) -> WeightVersion:
    """The version of a request of the manager."""
    state = scheduler.active_requests.get(key) or scheduler.waiting_requests[key]
    version: WeightVersion = state.logit_processor_kwargs["version"]
    return version


@contextlib.contextmanager
def _full_attention(config: Any, layers: Sequence[LayerAttention] | None) -> Iterator[None]:
    """In this context the config describes the KV cache that padded_attention.py needs for these layers: all keys of every layer,
    in the layers' own numbers and widths, and no place for layers without attention. transformers' cache would keep only a window
    of keys, and derives the widths from other fields than the layers do. A model without attention gets a cache that it does not
    use. None: the config stays as it is."""
    changed: dict[str, Any] = {}
    if layers is not None:
        num_places = max(1, len(layers))
        changed = {
            "num_hidden_layers": num_places,
            "layer_types": ["full_attention"] * num_places,
            "num_attention_heads": getattr(config, "num_attention_heads", 1),
            "num_key_value_heads": max((layer.num_key_heads for layer in layers), default=1),
            "head_dim": max((max(layer.key_width, layer.value_width) for layer in layers), default=1),
        }
    changed = {config.attribute_map.get(name, name): value for name, value in changed.items()}
    kept = {name: config.__dict__[name] for name in changed if name in config.__dict__}
    kind = type(config)
    config.__class__ = type(kind.__name__, (kind,), changed)  # some configs have a property of such a name
    config.__dict__.update(changed)
    try:
        yield
    finally:
        config.__class__ = kind
        for name in changed:
            del config.__dict__[name]
        config.__dict__.update(kept)


# -------------------------------------------------------------------------------------------------------------- engine


@dataclass(eq=False, slots=True)
class _Pending(Pending):
    """A request in flight. Its token_ids are those up to its last retraction; the manager sees them as part of the prompt."""

    sampling: tuple[float, float, int] = (1.0, 1.0, 0)  # temperature (0: greedy), top_p, top_k (0: all)
    stop_ids: list[int] = field(default_factory=list)


class TransformersEngine(GenerationEngine[_Pending]):
    """The embedded engine; see the module's docstring.

    Call all methods on the event loop. Methods whose docstring names the control or the generation thread run there.
    """

    def __init__(self, arguments: EngineArguments, *, device: str | torch.device = "", seed: int = 1) -> None:
        """device: "cpu", or a GPU with its index, without which no process can join an update group there; "": as rank_device."""
        super().__init__(arguments)
        self._initial_path, self._seed, self._lora = arguments.model_path, seed, arguments.lora
        self._returns_routes = arguments.returns_routes
        self._verified = VerifiedVersion()
        self._fingerprint = ""  # of the version on disk that was loaded last; changes to it alter the model in place
        self._loading = LoadProgress(arguments.model_path)
        # The device of the model's tensors
        self.weights_device = torch.device(device) if device else rank_device()
        if self.weights_device.type == "cuda" and self.weights_device.index is None:
            raise ValueError(f"device={device!r} has no index; use rank_device()")
        self._control = ThreadPoolExecutor(max_workers=1, thread_name_prefix="generation_control")
        self._opened = contextlib.AsyncExitStack()  # resources of `start`, released by `close`
        self._keys = itertools.count()
        self._standstill = contextlib.ExitStack()  # keeps the manager stopped between two passes after a pause in place
        self._checked = False  # the self-check has passed

    # ------------------------------------------------------------------------------------------------------ lifecycle

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._in_control(self._start)
        if not self._checked:
            await self._self_check()

    def progress(self) -> str:
        return self._loading.text()

    async def _self_check(self) -> None:
        """Raises ConfigError if decoding does not compute this model, and takes about a dozen passes. The engine serves nothing
        yet; counters, cache and random numbers are afterwards as before."""
        served = self._on_tokens, dict(self._num), self._paused, self._asleep
        self._on_tokens, self._version, self._paused, self._asleep = None, WeightVersion(0, 1), False, False
        devices = [self._model.device] if self.weights_device.type == "cuda" else []
        lengths = prompt_lengths(self._config.page_size, self._max_length)
        try:
            if longest_window(self._model.config) > max(lengths):
                await check_small_copy(self._model.config, self._config, self._small_engine)
            with torch.random.fork_rng(devices):
                await check_decoding(
                    self,
                    self.scoring_noise,
                    vocab_size=self._vocab_size,
                    lengths=lengths,
                    bits=torch.finfo(self._model.dtype).bits,
                    sharing=self._shares_prefixes,
                    versions=self._versions.begin_check() if self.keeps_versions else [None],
                )
                if self.keeps_versions:
                    self._versions.end_check()
        except (ValueError, EngineFailed) as error:
            raise self._cannot_run(error) from error
        finally:
            self._on_tokens, self._num, self._paused, self._asleep = served
            self._version = None
        await self._flush()
        self._checked = True

    def _small_engine(self, path: str, config: GenerationConfig) -> TransformersEngine:
        return TransformersEngine(EngineArguments(path, config), device=self.weights_device)

    def _cannot_run(self, error: Exception) -> ConfigError:
        why = (str(error) or repr(error)).rstrip(".")
        return ConfigError(
            f"model_path={str(self._initial_path)!r}: the embedded engine cannot sample from an architecture of type "
            f"{self._model.config.model_type!r}: {why}. Use another model, or SGLang (allocation=sglang...)"
        )

    def _start(self) -> None:
        config = self._config
        logger.info("generating on %s", self.weights_device)
        padded = config.attention == "padded"
        try:
            check_shards(Path(self._initial_path))
            with self._loading.watched():
                model: Any = auto_class(AutoConfig.from_pretrained(self._initial_path)).from_pretrained(
                    self._initial_path,
                    use_safetensors=True,
                    dtype=DTYPES[config.dtype],
                    attn_implementation=padded_attention.register() if padded else config.attention,
                )
        except (OSError, SafetensorError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"model_path={str(self._initial_path)!r}: the model cannot be loaded: {error}; copy it again, or give another"
            ) from error
        except (KeyError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"model_path={str(self._initial_path)!r}: this architecture has no replaceable attention in transformers "
                f"({error!r}), so the embedded engine cannot sample from it. Use another model, or SGLang (allocation=sglang...)"
            ) from error
        drop_towers(model)
        self._model = model.to(self.weights_device).requires_grad_(False).eval()
        layers = _check_attention(self._model, self._initial_path, config.attention)
        self._states = RequestStates(self._model)
        self._routes = RequestRoutes(self._model, self._initial_path) if self._returns_routes else None
        self._adapters: Adapters | None = None
        self._others: dict[str, TensorSpec] = {}
        if self._lora is None:
            self._places = places_of(model, {name: tensor.shape for name, tensor in model.state_dict().items()})
            stored = specs_of(weights.tensor_files(Path(self._initial_path)))
            self._others = {name: stored[name] for name in stored.keys() - self._places.keys()}
        else:
            self._adapters = add_adapters(self._model, self._lora, self._initial_path)
            self._places = self._adapters.places
            self._versions = AdapterVersions(self._model, self._adapters)
        self._scoring = "sdpa" if layers and not any(layer.needs_eager for layer in layers) else "eager"
        text_config = self._model.config.get_text_config()
        self._vocab_size = int(text_config.vocab_size)
        self._max_length = min(
            int(getattr(text_config, "max_position_embeddings", None) or 1 << 30), config.page_size * config.num_blocks
        )
        for eos in (
            getattr(text_config, "eos_token_id", None),
            getattr(self._model.generation_config, "eos_token_id", None),
        ):
            self._eos_token_ids.update([eos] if isinstance(eos, int) else eos or [])
        try:
            self._manager = self._make_manager(layers if padded else None)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            # An architecture that transformers' cache does not know
            raise self._cannot_run(error) from error
        self._opened.push_async_callback(self._stop)
        self._manager.start()

    @property
    def _shares_prefixes(self) -> bool:
        """With in_place, pages of the old weights remain after an update. States and routes are not kept by page."""
        by_request = bool(self._states.names) or self._returns_routes
        return self._config.prefix_sharing and self._config.interrupt != "in_place" and not by_request

    def _make_manager(self, padded: Sequence[LayerAttention] | None) -> _Manager:
        config = self._config
        manager = _Manager(
            self._model,
            ContinuousBatchingConfig(
                page_size=config.page_size,
                num_blocks=config.num_blocks,
                max_batch_tokens=config.max_batch_tokens,
                max_requests_per_batch=config.max_running_requests + self._num_check_slots,
                allow_block_sharing=self._shares_prefixes,
                return_logprobs=True,
                seed=self._seed,
                use_async_batching=False,  # with a pass in flight, the version of a token would not be known exactly
                use_cuda_graph=False,
                auto_switch_to_flash=False,
            ),
            padded=padded,
            states=self._states,
            routes=self._routes,
            versions=self._versions if self.keeps_versions else None,
            on_pass=self._count_pass,
            trace=self._trace,
        )
        manager.output_router = _Router(self._on_results, self._loop, self._routes)
        manager.prepare()
        return manager

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        await self._opened.aclose()
        self._control.shutdown(wait=False)
        self._fail_all(EngineUnavailable(CLOSING))

    async def _stop(self) -> None:
        await self._let_go()
        await self._in_control(lambda: self._manager.stop(hard_stop=True, timeout=_STOP_TIMEOUT_S))

    async def _release_devices(self) -> None:
        await self._opened.aclose()
        await self._in_control(self._drop)

    def _drop(self) -> None:
        """In the control thread: free the model and the KV cache. Their objects refer to each other, so they are collected here."""
        del self._manager, self._model, self._states, self._routes
        if self._lora is not None:
            del self._adapters, self._versions
        gc.collect()
        return_freed_memory()
        if self.weights_device.type == "cuda":
            torch.cuda.empty_cache()

    async def _acquire_devices(self) -> None:
        await self.start()

    async def _in_control(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._control, function)

    # ------------------------------------------------------------------------------------------------------- requests

    def _check(self, request: EngineRequest) -> None:
        check_params(request.params)
        check_prompt(
            request,
            vocab_size=self._vocab_size,
            max_prompt=self._max_length,
            max_length=self._max_length,
            why="the model's max_position_embeddings or the KV cache, generation.num_blocks * page_size",
        )

    def _make(self, request: EngineRequest, since: float, future: asyncio.Future[Generated]) -> _Pending:
        params = request.params
        stop_ids = [*(() if params.ignore_eos else self._eos_token_ids), *params.stop_token_ids]
        return _Pending(request, since, future, sampling=_sampling_of(params), stop_ids=stop_ids)

    def _new_key(self) -> str:
        return str(next(self._keys))

    def _begin(self, pending: _Pending) -> None:
        accepted = self._manager.add_request(
            pending.request.input_ids + pending.token_ids,
            request_id=pending.key,
            max_new_tokens=pending.request.params.max_new_tokens - len(pending.token_ids),
            eos_token_id=pending.stop_ids,
            sampling=pending.sampling,
            version=pending.version if self.keeps_versions else None,
        )
        if accepted is None:
            self._fail(pending, EngineFailed("the generation thread has ended"))

    def _on_results(self, outputs: list[tuple[Any, Routes | None]]) -> None:
        """Handle the results of one pass of the generation thread. Runs on the event loop."""
        for output, routes in outputs:
            pending = self._running.get(output.request_id)
            if pending is None:
                continue  # aborted meanwhile
            tokens, logprobs = output.generated_tokens, output.logprobs
            if output.error is not None:
                self._fail(pending, EngineFailed(output.error))
            elif not all(map(math.isfinite, logprobs)):
                self._fail(pending, EngineFailed(f"logprobs are not finite under weight version {pending.version}"))
            else:
                self._extend(pending, tokens, logprobs, routes)
                if tokens and tokens[-1] in pending.stop_ids:
                    finish = FinishReason(type="stop", matched=tokens[-1])
                else:
                    finish = FinishReason(type="length", length=len(pending.token_ids))
                self._answer(pending, finish)
        self._admit()

    def _extend(
        self, pending: _Pending, tokens: list[int], logprobs: list[float], routes: Routes | None = None
    ) -> None:
        """Append tokens to those from before its last retraction. routes: of all tokens that passes have computed since."""
        pending.token_ids.extend(tokens)
        pending.logprobs.extend(logprobs)
        if tokens and routes is not None:  # without a token nothing was sampled with these routes
            pending.add_routes(routes)
        pending.close_span(pending.version, len(pending.token_ids))

    def _end_unread(self, pending: _Pending) -> None:
        self._manager.cancel_request(pending.key)
        self._answer(pending, FinishReason(type="abort", message="the caller cancelled the request"))

    # ------------------------------------------------------------------------------------------------ abort and pause

    async def _abort_running(self, pending: _Pending) -> bool:
        return bool(await self._end([pending]))

    async def _end_running(self, *, retract: bool = False) -> int:
        return len(await self._end(list(self._running.values()), retract=retract))

    async def _end(self, requests: list[_Pending], *, retract: bool = False) -> list[_Pending]:
        """End these requests. Returns those that did not finish meanwhile."""
        if not requests:
            return []
        states = await self._in_control(lambda: self._collect([pending.key for pending in requests]))
        # The event loop has processed the results of earlier passes before this line, so requests still here did not finish.
        ended = [pending for pending in requests if pending.key in self._running]
        for pending in reversed(ended):  # the first of them returns to the front of the queue last
            self._extend(pending, *states.get(pending.key, ([], [])))
            if retract:
                self._stopped(pending)
                self._put_back(pending)
            else:
                self._abort_pending(pending)
        self._admit()
        return ended

    async def _hold(self) -> None:
        if self._running and not self._held:
            self._held = await self._in_control(self._stand_still)

    async def _let_go(self) -> None:
        self._held = False
        await self._in_control(self._standstill.close)

    def _stand_still(self) -> bool:
        """In the control thread: stop the manager between two passes until `resume`. Returns False if it has ended."""
        if self._manager.is_running():
            self._standstill.enter_context(self._manager.pause())
        return self._manager.is_running()

    def _collect(self, keys: list[str]) -> dict[str, tuple[list[int], list[float], Routes | None]]:
        """In the control thread: remove requests from the manager between two passes; returns their tokens, logprobs and routes."""
        collected = {}
        if not self._manager.is_running():
            return {}
        with self._manager.pause():
            scheduler = self._manager.processor.scheduler
            for key in keys:
                state = scheduler.active_requests.get(key) or scheduler.waiting_requests.get(key)
                if state is not None:
                    output = state.to_generation_output()  # type: ignore[no-untyped-call]
                    routes = self._routes.take(key) if self._routes else None
                    collected[key] = (output.generated_tokens, output.logprobs, routes)
                scheduler.set_request_cancellation(key)
            for state in scheduler.clear_cancelled_requests():
                self._manager.processor.offloading_manager.free_request_cpu_cache(state)
            # Some requests may still be on their way to the scheduler: taken from the queue before the pause, or still in it.
            # They are cancelled when they arrive.
            for key in keys:
                if key not in collected:
                    scheduler.set_request_cancellation(key)
                    self._manager.cancel_request(key)
        return collected

    # ------------------------------------------------------------------------------------------------ weights and cache

    async def verify_ahead(self, path: Path, version: WeightVersion) -> None:
        try:
            await asyncio.to_thread(self._verified.verify, path, version)
        except (WeightsError, OSError) as error:
            raise WeightsRefused(f"{path}: {error}", classify(error)) from error

    async def load_weights(self, path: Path, version: WeightVersion, *, abort_running: bool = False) -> int:
        load: Callable[[], None] = partial(self._load_version, path, version)
        if self._lora is not None:  # requests run meanwhile
            self._check_alive()
            load = await asyncio.to_thread(self._read_adapter, path, version)
        num_aborted = await self._update(version, load, abort_running=abort_running)
        self._path = str(path)
        return num_aborted

    def _load_version(self, path: Path, version: WeightVersion) -> None:
        """In the control thread."""
        served = self._fingerprint if self._version is not None else ""
        self._fingerprint = self._live().load_version(path, version, self._verified, served)

    def _read_adapter(self, path: Path, version: WeightVersion) -> Callable[[], None]:
        """Verify and read a version. Returns the function that makes it the newest, for the control thread."""
        adapters, new = self._versions.adapters, self._versions.empty()
        try:
            check_about(path, adapters.lora, "", adapters.layers)
        except WeightsError as error:
            raise WeightsRefused(str(error), classify(error)) from error
        LiveTensors(new, self._places, self._others).load_version(path, version, self._verified)
        return partial(self._versions.install, new, version, keeps=self.keeps_versions)

    async def _unload(self, version: WeightVersion) -> None:
        def unload() -> None:
            with self._manager.pause():
                self._versions.unload(version)

        await self._in_control(unload)

    def _live(self) -> LiveTensors:
        return LiveTensors(self._model, self._places, self._others)

    def weight_receiver(self, host: str) -> WeightReceiver:
        return StagedReceiver(self, host, self._clock)

    def check_tensors(self, specs: TensorSpecs, *, complete: bool) -> None:
        """Raises WeightsRefused if these tensors do not fit the model, or, with `complete`, if any tensor is missing."""
        self._live().check(specs, complete=complete)

    def uses(self, flats: Sequence[Tensor]) -> list[bool]:
        """For each buffer, whether tensors of the model are in its memory."""
        return self._live().uses(flats)

    async def load_tensors(self, tensors: dict[str, Tensor], version: WeightVersion) -> None:
        """Like load_weights, for tensors in memory. Their memory may become the model's.

        Raises WeightsRefused; in that case nothing has changed.
        """
        self._fingerprint = ""  # the version on disk may have other files
        await self._update(version, partial(self._load_tensors, tensors, version))

    def _load_tensors(self, tensors: dict[str, Tensor], version: WeightVersion) -> None:
        """In the control thread."""
        if self._lora is None:
            self._live().load(tensors)
        else:
            new = self._versions.empty()
            LiveTensors(new, self._places, self._others).load(tensors)
            self._versions.install(new, version, keeps=self.keeps_versions)

    async def _update(self, version: WeightVersion, load: Callable[[], None], *, abort_running: bool = False) -> int:
        """Load a version in the control thread while no request runs; returns how many requests were ended for it."""
        async with self._updated(version, abort_running=abort_running) as num_aborted:
            kept = await self._in_control(lambda: self._load(load, version))
            for key, num_tokens in kept.items():
                pending = self._running[key]
                pending.close_span(pending.version, len(pending.token_ids) + num_tokens)
                pending.version = version
        return num_aborted

    def _load(self, load: Callable[[], None], version: WeightVersion) -> dict[str, int]:
        """In the control thread, between two passes: call `load`. If the engine keeps one version, no request starts meanwhile, and
        none runs except those that a pause in place has stopped.

        Returns, for each of the stopped requests, how many tokens it has sampled since the manager got it.
        """
        with self._manager.pause():
            try:
                with self._trace.span("load weights", track="engine", version=str(version)):
                    load()
            except WeightsRefused:
                raise
            except BaseException:
                self._version = None  # the copy failed half-way: serve nothing until a load succeeds
                raise
            if self.keeps_versions:
                return {}
            if not self._held:
                self._empty_cache()
                return {}
            active: Any = self._manager.processor.scheduler.active_requests
            return {
                key: len(active[key].to_generation_output().generated_tokens) if key in active else 0
                for key in self._running
            }

    async def score(self, input_ids: list[int], version: WeightVersion | None = None) -> list[float]:
        self._check_alive()
        if min(input_ids, default=-1) < 0 or max(input_ids) >= self._vocab_size:
            raise RequestRefused(f"input_ids to score must be one or more tokens from 0 to {self._vocab_size - 1}")
        return await self._in_control(partial(self._score, input_ids, version=version))  # type: ignore[no-any-return]

    async def scoring_noise(self, input_ids: list[int]) -> float:
        """The model's own rounding: the largest change of a logprob in other computations of the same text. These are without up
        to _FEWER_TOKENS last tokens, which changes the shapes of products, and with transformers' other attention implementations.
        """
        full: list[float] = await self._in_control(partial(self._score, input_ids))
        others: list[list[float]] = [
            await self._in_control(partial(self._score, input_ids[:-fewer])) for fewer in range(1, _FEWER_TOKENS + 1)
        ]
        for attention in ("eager", "sdpa"):
            with contextlib.suppress(ValueError):  # the architecture does not have it
                others.append(await self._in_control(partial(self._score, input_ids, attention)))
        return max(abs(a - b) for other in others for a, b in zip(full, other, strict=False))

    def _score(
        self, input_ids: list[int], implementation: str = "", *, version: WeightVersion | None = None
    ) -> list[float]:
        """In the control thread, between two passes: score with the model in memory, without the manager's cache.

        implementation: of the attention, because that of generation needs the manager's pages; "": the one that fits.
        """
        attention = self._model.config._attn_implementation
        versions = self._versions.of_text(version, len(input_ids)) if self._adapters else contextlib.nullcontext()
        with self._manager.pause(), torch.inference_mode(), versions:
            self._model.set_attn_implementation(implementation or self._scoring)
            try:
                ids_T = torch.tensor(input_ids, device=self.weights_device)
                logits_TV = self._model(input_ids=ids_T[None], use_cache=False).logits[0].float()
                logprobs_T = torch.log_softmax(logits_TV[:-1], dim=-1).gather(1, ids_T[1:, None]).squeeze(1)
            except (RuntimeError, ValueError) as error:
                raise EngineFailed(f"scoring failed: {error}") from error
            finally:
                self._model.set_attn_implementation(attention)
        return [0.0, *logprobs_T.tolist()]

    async def _flush(self) -> bool:
        def flush() -> None:
            with self._manager.pause():
                self._empty_cache()

        await self._in_control(flush)
        return True

    def _empty_cache(self) -> None:
        """In the control thread, within a pause: drop all cached pages, so that none of the old weights can match as a prefix.

        Cancelled requests may still be in the manager. They are removed, too; otherwise they could complete a page of old keys.
        """
        scheduler = self._manager.processor.scheduler
        for key in [*scheduler.active_requests, *scheduler.waiting_requests]:
            scheduler.set_request_cancellation(key)
        for state in scheduler.clear_cancelled_requests():
            self._manager.processor.offloading_manager.free_request_cpu_cache(state)
        self._manager.processor.cache.reset()

    # ----------------------------------------------------------------------------------------------------------- state

    def _count_pass(self, num_new_tokens: Mapping[WeightVersion | None, int]) -> None:
        """In the generation thread, once per pass: count steps, and tokens by version. None: the only one."""
        self._num["steps"] += 1
        self._num["tokens"] += sum(num_new_tokens.values())
        if self._on_tokens is not None:
            for version, count in num_new_tokens.items():
                self._on_tokens(count, str(version or self._version))

    def _used_tokens(self) -> int:
        """KV cache use of the running requests. Read while the generation thread runs, so at most one pass old."""
        if not self._running:
            return 0
        active: Any = self._manager.processor.scheduler.active_requests
        states = [active.get(key) for key in list(self._running)]
        return sum(int(state.position_offset) for state in states if state is not None)

    @property
    def failure(self) -> BaseException | None:
        if self._closing or self._asleep or self._manager.is_running():
            return None
        return self._manager.background_thread_status.fatal_error or RuntimeError("the generation thread has ended")


# -------------------------------------------------------------------------------------------------------------- checks


def _sampling_of(params: SamplingParams) -> tuple[float, float, int]:
    """(temperature, top_p, top_k) in the sampler's form: temperature 0 is greedy, top_k 0 means all."""
    if params.temperature == 0.0:
        return (0.0, 1.0, 0)
    return (params.temperature, params.top_p, max(params.top_k, 0))


def _check_attention(model: Any, path: Path | str, attention: str) -> list[LayerAttention]:
    """Return the attention layers. Raises ConfigError if the KV cache or the attention implementation does not fit them."""
    layers, config = read_attention(model, path), model.config.get_text_config()
    sizes = {(layer.num_key_heads, max(layer.key_width, layer.value_width)) for layer in layers}
    what = f"model_path={str(path)!r}: architecture {model.config.model_type!r}"
    if len(sizes) > 1 or len({layer.layer for layer in layers}) < len(layers):
        raise ConfigError(
            f"{what} has layers with keys of several sizes, or several attentions in one layer. The KV cache of the embedded engine"
            " has one size and one place for each layer. Support would take a cache group for each; until then generate with sglang"
        )
    if attention == "padded":
        return layers
    try:
        cached = {i: kind for kind, group in group_layers_by_attn_type(config).items() for i in group}
    except ValueError as error:
        cached, why = {}, str(error)
    for layer in layers:
        window = config.sliding_window if cached.get(layer.layer) == SLIDING_ATTENTION else 0
        size = (find_num_key_value_heads(config), find_head_dim(config), find_head_dim(config))
        if layer.layer in cached and layer.pattern != Pattern(window=window):
            why = f"transformers' cache would keep {window or 'all'} keys of layer {layer.layer}, which needs {layer.pattern}"
        elif layer.layer in cached and (layer.num_key_heads, layer.key_width, layer.value_width) != size:
            why = f"layer {layer.layer} has keys and values of other sizes than transformers' cache"
        elif layer.has_softcap and attention in ("sdpa", "eager"):
            why = "it does not compute the soft cap of the attention's logits"
        elif layer.layer in cached:
            continue
        raise ConfigError(f"generation.attention={attention!r} does not fit {what} ({why}); use padded")
    return layers


# -------------------------------------------------------------------------------------------------- the model's tensors


class LiveTensors:
    """The tensors of the running model. Overwrites them from a version's files or from memory (weights over the network).

    The tensors have the names and shapes of the checkpoint. All checks come before the first copy: the tensors must be exactly the
    model's. The generation thread must be paused.
    """

    def __init__(
        self, model: torch.nn.Module | NewAdapter, places: Mapping[str, Place], others: Mapping[str, TensorSpec]
    ) -> None:
        """places: of the checkpoint's tensors in the model's. others: tensors of the checkpoint that the model does not have. A
        version may have them, too."""
        state, parameters = model.state_dict(), dict(model.named_parameters())
        self._live: dict[str, Tensor] = {name: place.within(state[place.name]) for name, place in places.items()}
        self._parameters = {
            name: parameters[place.name]
            for name, place in places.items()
            if place.is_whole and place.name in parameters
        }
        self._expected = {
            name: TensorSpec(tuple(tensor.shape), tensor.dtype.is_floating_point) for name, tensor in self._live.items()
        }
        self._expected |= others
        aliases: dict[tuple[int, tuple[int, ...]], list[str]] = {}  # tied weights: several names share one memory
        for name, tensor in self._live.items():
            aliases.setdefault((tensor.data_ptr(), tuple(tensor.shape)), []).append(name)
        self._aliases = list(aliases.values())

    def load_version(
        self, directory: Path, version: WeightVersion, verified: weights.VerifiedVersion, served: str = ""
    ) -> str:
        """Verify a version and load it: all folders of its chain, or only the changes to the version that is loaded already.

        served: fingerprint of that version; "": unknown. Returns the fingerprint of the new one. Raises WeightsRefused; in that
        case nothing has changed. After any other error the tensors are unknown.
        """
        try:
            chain = verified.verify(directory, version)
            fingerprints = [manifest.fingerprint for _, manifest in chain]
            first = fingerprints.index(served) + 1 if served in fingerprints[:-1] else 0
            parts = [_Part(*link, self._expected, self._aliases) for link in chain[first:]]
        except (WeightsError, SafetensorError, OSError) as error:
            raise WeightsRefused(f"{directory}: {error}", classify(error)) from error
        for part in parts:
            self._check_tied(part.tensor, set(part.where), source=str(part.folder))
        for part in parts:
            self._copy(part.tensor, set(part.where))
            part.form.apply([one for one in part.changes if one.name in self._live], self._live)
        self._settle()
        return fingerprints[-1]

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Load tensors from memory. Their memory may become the model's; the caller must not write to it while `uses` reports it.

        Raises WeightsRefused; in that case nothing has changed.
        """
        specs = TensorSpecs(
            names=list(tensors),
            dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            shapes=[list(tensor.shape) for tensor in tensors.values()],
        )
        self.check(specs, complete=True)
        self._check_tied(tensors.__getitem__, set(tensors), source="the received weights")
        self._copy(tensors.__getitem__, set(tensors), adopt=True)
        self._settle()

    def uses(self, flats: Sequence[Tensor]) -> list[bool]:
        """For each buffer, whether a tensor of the model is in its memory."""
        live = {tensor.untyped_storage().data_ptr() for tensor in self._live.values()}
        return [flat.untyped_storage().data_ptr() in live for flat in flats]

    def check(self, specs: TensorSpecs, *, complete: bool) -> None:
        """Raises WeightsRefused if tensors with these specs do not fit, or, with `complete`, if any is missing."""
        check_sent(self._expected, self._aliases, specs, complete=complete)

    def _check_tied(self, tensor_of: Callable[[str], Tensor], given: set[str], *, source: str) -> None:
        """Raises WeightsRefused if names that share memory in the model (tied weights) have different values."""
        for names in self._aliases:
            present = [name for name in names if name in given]
            for other in present[1:]:
                if not torch.equal(tensor_of(present[0]), tensor_of(other)):
                    raise WeightsRefused(
                        f"{source}: {present[0]} and {other} are one tensor in this model (tied) but differ here",
                        ErrorClass.PERMANENT,
                    )

    @torch.no_grad()
    def _copy(self, tensor_of: Callable[[str], Tensor], given: set[str], *, adopt: bool = False) -> None:
        """Overwrite those tensors of the model that are given.

        adopt: parameters use the memory of the new tensors where possible (`_is_like`), so that these are not copied.
        """
        for names in self._aliases:
            name = next((name for name in names if name in given), "")
            if not name:
                continue  # its changes, if any, are applied afterwards
            tensor, live = tensor_of(name), self._live[name]
            parameters = [self._parameters[alias] for alias in names if alias in self._parameters]
            if adopt and parameters and _is_like(tensor, live):
                for parameter in parameters:
                    parameter.data = tensor
            else:
                live.copy_(tensor)

    def _settle(self) -> None:
        if next(iter(self._live.values())).is_cuda:
            torch.cuda.synchronize()  # the passes run on another stream


class _Part:
    """The checked content of one folder of a version: whole tensors, and the changes of the others."""

    def __init__(
        self, folder: Path, manifest: weights.Manifest, expected: dict[str, TensorSpec], aliases: list[list[str]]
    ) -> None:
        """Raises WeightsRefused, SafetensorError, OSError, WeightsError."""
        self.folder, self.form = folder, FORMS[manifest.kind]
        files, self.changes = weights.tensor_files(folder), self.form.read(folder)
        changed = [(part.name, part.dtype, tuple(part.shape), f"a {manifest.kind}") for part in self.changes]
        self.where = check_tensors(expected, aliases, files, changed)
        self._opened: dict[Path, Any] = {file: safe_open(str(file), framework="pt", device="cpu") for file in files}
        changes = {part.name: part.content for part in self.changes}
        for names in aliases:
            if len({changes.get(name) for name in names if name in changes or name in self.where}) > 1:
                raise WeightsRefused(
                    f"{folder}: {' and '.join(names)} are one tensor in this model (tied) but differ here",
                    ErrorClass.PERMANENT,
                )

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._opened[self.where[name]].get_tensor(name)
        return tensor


def _is_like(tensor: Tensor, live: Tensor) -> bool:
    """Whether the model can use the tensor's memory in place of its own, with torch's alignment and therefore at full speed.

    The live tensor's alignment does not matter: tensors loaded from a file keep their offset in it and may be less aligned.
    """
    same = (
        tensor.dtype == live.dtype and tensor.device == live.device and tensor.is_contiguous() and live.is_contiguous()
    )
    return same and tensor.data_ptr() % _ALIGNMENT == 0
