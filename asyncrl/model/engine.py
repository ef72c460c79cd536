"""Training engine: one Hugging Face causal language model on one data-parallel rank.

Interfaces (asyncrl/model/interfaces.py) say what to compute; the engine loads, runs forward and backward in token-budget
micro-batches, sums gradients over ranks, steps the optimizer and hands out weights. Every rank holds a full replica: the same
initial weights from disk, the same summed gradient, the same step. So parameters stay equal without ever being sent.

Same update in any layout: the loss of a micro-batch is a sum that is already divided by the global denominator, so that
gradients add up over micro-batches and over ranks, whoever holds what. A rank that holds nothing adds zero.

Shapes: T tokens of a micro-batch, packed; N tokens that are predicted; H hidden size.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from asyncrl.config import ConfigError, OptimizerConfig, TrainConfig
from asyncrl.data.sequence import SequenceSample
from asyncrl.model.interfaces import LossFn
from asyncrl.model.logprobs import token_logprobs
from asyncrl.model.packing import MicroBatch, Rows, SequenceBatch, cu_seqlens_of, plan_micro_batches
from asyncrl.update_group import Bucket, pack

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_HEAD_CHECK_TOKENS = 4
_LOADING = threading.Lock()  # from_pretrained patches torch for the whole process while it builds the empty model


class TrainEngine:
    """A model that gives logprobs and, if trainable, is trained. All methods run on the worker's compute thread."""

    def __init__(
        self,
        model_path: str | Path,
        train: TrainConfig,
        *,
        device: str | torch.device = "cpu",
        process_group: dist.ProcessGroup | None = None,
        trainable: bool = True,
    ) -> None:
        """process_group: the data-parallel ranks; None where this is the only one.

        Trained weights are float32 whatever train.dtype says: with bfloat16 the computation is autocast and weights are
        handed out in bfloat16, while small updates are not lost. A frozen model is loaded in train.dtype itself.
        """
        if train.dtype not in DTYPES:
            raise ValueError(f"train.dtype is {train.dtype!r}; choose one of {', '.join(DTYPES)}")
        self.train = train
        self.device = torch.device(device)
        self.trainable = trainable
        self.group = process_group
        self.dp_rank = process_group.rank() if process_group is not None else 0
        self.dp_size = process_group.size() if process_group is not None else 1
        self.dtype = DTYPES[train.dtype]
        self.model = _load(model_path, torch.float32 if trainable else self.dtype, self.device)
        self.vocab_size: int = self.model.config.get_text_config().vocab_size
        self._backbone = self.model.base_model
        self._output_layer = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._check_output_layer(model_path)
        self._total_steps = train.total_steps
        self.skipped_steps = 0
        if not trainable:
            self.model.requires_grad_(False)
            return
        if train.gradient_checkpointing:
            # Renamed within transformers 5; the first argument is the same.
            enable = getattr(self.model, "activation_checkpointing_enable", None)
            (enable or self.model.gradient_checkpointing_enable)({"use_reentrant": False})
            self.model.train()  # transformers checkpoints in training mode only; _load has put all dropout to 0
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._flat_grad = _flatten_gradients(parameters)
        self._optimizer = _make_optimizer(self.model, train.optimizer, fused=self.device.type == "cuda")

    # ---------------------------------------------------------------------------------------------------------- inference

    @torch.no_grad()
    def logprobs(self, sample: SequenceSample, *, temperature: float) -> npt.NDArray[np.float32]:
        """log p(token t | tokens before it), packed like packed_input_ids; 0 for the first token of each sequence."""
        batch = SequenceBatch.of(sample.select_keys(["packed_input_ids"]))
        result = np.zeros(len(batch.data["packed_input_ids"]), np.float32)
        starts = cu_seqlens_of(batch.lengths)
        for micro_batch in plan_micro_batches(batch.lengths, self.train.max_tokens_per_mb):
            packed_ids = batch.select(micro_batch.sequences)["packed_input_ids"]
            logprobs_T, _ = self._forward(packed_ids, batch, micro_batch, temperature)
            values, at = logprobs_T.cpu().numpy(), 0
            for i in micro_batch.sequences:
                result[starts[i] : starts[i + 1]] = values[at : at + batch.lengths[i]]
                at += batch.lengths[i]
        return result

    @torch.no_grad()
    def next_token_logits(self, input_ids: Sequence[int]) -> Tensor:
        """Logits of the token after these, float32, on the CPU."""
        with self._autocast():
            input_ids_1T = torch.tensor([input_ids], device=self.device)
            logits_V: Tensor = self.model(input_ids=input_ids_1T, use_cache=False).logits[0, -1]
        return logits_V.float().cpu()

    def _forward(
        self, packed_ids: npt.NDArray[np.int64], batch: SequenceBatch, micro_batch: MicroBatch, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """(logprobs_T, entropy_T) of a micro-batch, packed and aligned: position t describes token t."""
        rows = Rows.of(packed_ids, [batch.lengths[i] for i in micro_batch.sequences], micro_batch.width)
        input_ids = self._tensor(rows.input_ids)
        predicted = self._tensor(rows.predicted)
        with self._autocast():
            hidden_RWH = self._backbone(input_ids=input_ids, use_cache=False).last_hidden_state
            hidden_NH = hidden_RWH.flatten(0, 1)[self._tensor(rows.predictors)]
            logprobs_N, entropy_N = token_logprobs(
                hidden_NH,
                self._output_layer,
                self._tensor(packed_ids)[predicted],
                temperature=temperature,
                chunk_tokens=self.train.logprob_chunk_tokens,
            )
        zeros_T = logprobs_N.new_zeros(rows.num_tokens)
        return zeros_T.index_put((predicted,), logprobs_N), zeros_T.index_put((predicted,), entropy_N)

    # ----------------------------------------------------------------------------------------------------------- training

    def set_total_steps(self, total_steps: int) -> None:
        """What the learning rate decays over, in lr_steps. 0: unknown, no decay."""
        self._total_steps = total_steps

    def train_step(
        self, sample: SequenceSample | None, loss_fn: LossFn, *, temperature: float, lr_step: int
    ) -> dict[str, float]:
        """One optimizer step on this rank's part of a batch. Collective: every rank calls it, without groups too.

        Consumes the part and loss_fn; produces new parameters, the same on all ranks, and statistics over all ranks (those of
        loss_fn, `loss`, `grad_norm`, `lr`, `skipped_steps`). Waits for the other ranks in two all-reduces, limited by the
        process group's timeout; unblocked by their arrival or by the loss of their connection. A loss or gradient that
        is not finite skips the step on all ranks and is counted.
        """
        if not self.trainable:
            raise RuntimeError("train_step on a frozen model")
        self._flat_grad.zero_()
        local: dict[str, Tensor] = {"loss": torch.zeros((), device=self.device)}
        for data, batch, micro_batch in self._micro_batches(sample):
            packed_ids = data["packed_input_ids"]
            logprobs_T, entropy_T = self._forward(packed_ids, batch, micro_batch, temperature)
            cu_seqlens = self._tensor(cu_seqlens_of([batch.lengths[i] for i in micro_batch.sequences]))
            tensors = {key: self._tensor(array) for key, array in data.items()}
            loss, stats = loss_fn(logprobs_T, entropy_T, tensors, cu_seqlens)
            loss.backward()  # type: ignore[no-untyped-call]
            _accumulate(local, {"loss": loss, **stats})
        if self.group is not None:
            dist.all_reduce(self._flat_grad, group=self.group)
        result = self._reduce_stats({name: float(value) for name, value in local.items()})
        return result | self._step(result["loss"], lr_step)

    def _micro_batches(
        self, sample: SequenceSample | None
    ) -> Iterator[tuple[dict[str, npt.NDArray[Any]], SequenceBatch, MicroBatch]]:
        if sample is None or sample.num_ids == 0:
            return
        batch = SequenceBatch.of(sample)
        for micro_batch in plan_micro_batches(batch.lengths, self.train.max_tokens_per_mb):
            yield batch.select(micro_batch.sequences), batch, micro_batch

    def _step(self, loss: float, lr_step: int) -> dict[str, float]:
        """Clip and step on the summed gradient. The decision to skip is made from summed values: the same on every rank."""
        optimizer = self.train.optimizer
        grad_norm = float(torch.linalg.vector_norm(self._flat_grad))
        lr = learning_rate(optimizer, lr_step, self._total_steps)
        finite = math.isfinite(grad_norm) and math.isfinite(loss)
        if finite:
            if 0 < optimizer.grad_clip < grad_norm:
                self._flat_grad.mul_(optimizer.grad_clip / grad_norm)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        else:
            self.skipped_steps += 1
            logger.warning("step skipped: loss %g, gradient norm %g (%d so far)", loss, grad_norm, self.skipped_steps)
        return {"grad_norm": grad_norm, "lr": lr, "skipped_steps": 0.0 if finite else 1.0}

    # ---------------------------------------------------------------------------------------------------- between the ranks

    def all_reduce_sum(self, values: npt.NDArray[Any] | Sequence[float]) -> npt.NDArray[np.float64]:
        """Sums over the data-parallel ranks, in float64. Collective."""
        array = np.array(values, dtype=np.float64)
        if self.group is None:
            return array
        tensor = self._tensor(array)
        dist.all_reduce(tensor, group=self.group)
        return tensor.cpu().numpy()

    def _reduce_stats(self, local: dict[str, float]) -> dict[str, float]:
        """Statistics over all ranks. A rank without groups knows no names, so names travel with the values."""
        if self.group is None:
            return local
        payload = np.frombuffer(msgspec.msgpack.encode(local), np.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.dp_size)]
        dist.all_gather(sizes, self._tensor(np.array([len(payload)])), group=self.group)
        longest = max(int(size) for size in sizes)
        padded = np.zeros(longest, np.uint8)
        padded[: len(payload)] = payload
        payloads = [torch.zeros(longest, dtype=torch.uint8, device=self.device) for _ in range(self.dp_size)]
        dist.all_gather(payloads, self._tensor(padded), group=self.group)
        result: dict[str, float] = {}
        for size, buffer in zip(sizes, payloads, strict=True):
            stats = msgspec.msgpack.decode(buffer[: int(size)].cpu().numpy().tobytes(), type=dict[str, float])
            for name, value in stats.items():
                both = (result[name], value) if name in result else (value,)
                result[name] = max(both) if name.endswith("_max") else math.fsum(both)
        return result

    # ------------------------------------------------------------------------------------------------------------- weights

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """A snapshot of all weights under their Hugging Face names, on the CPU, in train.dtype; shared ones once.

        Training may go on while the snapshot is written.
        """
        return [
            (name, tensor.to("cpu", self._handed_out(tensor), copy=True).contiguous())
            for name, tensor in self._state().items()
        ]

    def buckets(self, bucket_bytes: int) -> list[Bucket]:
        """Like named_tensors, laid out for the network (update_group.py): buckets of at most bucket_bytes."""
        state = self._state().items()
        return pack(((name, tensor, self._handed_out(tensor)) for name, tensor in state), bucket_bytes)

    def _handed_out(self, tensor: Tensor) -> torch.dtype:
        return self.dtype if tensor.is_floating_point() else tensor.dtype

    def save(self, path: str | Path, tensors: Sequence[tuple[str, Tensor]] | None = None) -> None:
        """Write Hugging Face format; `AutoModelForCausalLM.from_pretrained(path)` loads it.

        tensors: an earlier snapshot; with one, this may run on any thread while training goes on.
        """
        Path(path).mkdir(parents=True, exist_ok=True)
        state = dict(self.named_tensors() if tensors is None else tensors)
        self.model.save_pretrained(path, state_dict=state, save_original_format=False)

    @torch.no_grad()
    def _state(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers in the names of a checkpoint. named_parameters gives shared ones once."""
        persistent = self.model.state_dict(keep_vars=True)
        state = {name: tensor.detach() for name, tensor in self.model.named_parameters()}
        state |= {name: tensor.detach() for name, tensor in self.model.named_buffers() if name in persistent}
        return dict(revert_weight_conversion(self.model, state))

    # -------------------------------------------------------------------------------------------------------------- inside

    def _tensor(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.tensor(array, device=self.device)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if not self.trainable or self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    @torch.no_grad()
    def _check_output_layer(self, model_path: str | Path) -> None:
        """The output layer alone must give the model's logits: some architectures scale or cap them afterwards."""
        input_ids = torch.arange(_HEAD_CHECK_TOKENS, device=self.device)[None] % self.vocab_size
        with self._autocast():
            expected = self.model(input_ids=input_ids, use_cache=False).logits.float()
            hidden = self._backbone(input_ids=input_ids, use_cache=False).last_hidden_state
            found = self._output_layer(hidden).float()
        if expected.isnan().any():
            raise ConfigError(
                f"model_path={str(model_path)!r}: its weights are broken: they give logits that are no numbers; copy them again"
            )
        if not torch.allclose(found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())):
            raise ValueError(
                f"{model_path}: architecture {self.model.config.model_type!r} changes its logits after the output layer; "
                "logprobs in chunks do not support that"
            )


def learning_rate(optimizer: OptimizerConfig, step: int, total_steps: int) -> float:
    """Linear warm-up over warmup_steps, then linear or cosine decay to min_lr_ratio * lr at total_steps; step counts from 0."""
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    if optimizer.schedule == "constant" or total_steps <= optimizer.warmup_steps:
        return optimizer.lr
    done = min(1.0, (step - optimizer.warmup_steps) / (total_steps - optimizer.warmup_steps))
    if optimizer.schedule == "linear":
        left = 1.0 - done
    elif optimizer.schedule == "cosine":
        left = 0.5 * (1.0 + math.cos(math.pi * done))
    else:
        raise ValueError(f"train.optimizer.schedule is {optimizer.schedule!r}; choose linear, cosine or constant")
    return optimizer.lr * (optimizer.min_lr_ratio + (1.0 - optimizer.min_lr_ratio) * left)


def _load(model_path: str | Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model in evaluation mode, with dropout off for good: logprobs must not depend on chance."""
    try:
        config = AutoConfig.from_pretrained(model_path)
        for name, value in config.to_dict().items():
            if isinstance(value, float) and (name.endswith(("dropout", "_pdrop")) or "dropout_" in name):
                setattr(config, name, 0.0)
        with _LOADING:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                model_path, config=config, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
            )
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"model_path={str(model_path)!r}: the model cannot be loaded: {error}; copy it again, or give another"
        ) from error
    model: PreTrainedModel = loaded[0]
    if lacking := sorted(loaded[1]["missing_keys"]):  # transformers would make them up
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise ConfigError(
            f"model_path={str(model_path)!r}: its weights lack {', '.join(lacking[:3])}{more}, which a model of type "
            f"{config.model_type!r} has; copy the weights again, or the config.json that belongs to them"
        )
    model.to(device)  # type: ignore[arg-type]
    model.eval()  # type: ignore[no-untyped-call]
    return model


def _flatten_gradients(parameters: Sequence[torch.nn.Parameter]) -> Tensor:
    """One buffer for all gradients; each parameter's .grad becomes a view of it, which backward adds to."""
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float32, device=parameters[0].device)
    at = 0
    for parameter in parameters:
        parameter.grad = flat[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
    return flat


def _make_optimizer(model: PreTrainedModel, config: OptimizerConfig, *, fused: bool) -> torch.optim.AdamW:
    """AdamW; vectors (norms and biases) do not decay."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=fused,
    )


def _accumulate(total: dict[str, Tensor], stats: Mapping[str, Tensor]) -> None:
    for name, value in stats.items():
        value = value.detach().double()
        if name not in total:
            total[name] = value
        else:
            total[name] = torch.maximum(total[name], value) if name.endswith("_max") else total[name] + value
