"""A model's weights: loaded whole, or as the pieces that this rank of a mesh holds.

A sharded model is created without weights. The tensor ranks split its layers according to transformers' plans, it is cut to its
stage (pipeline.py), and the data ranks split its units (FSDP2). Then each rank reads its own part of each tensor, and checks and
casts it on its device. So while it loads, a rank holds its share of the model and one part more.

Tensor parallelism follows Megatron-LM (arXiv:1909.08053), with sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198).
Between attention and MLPs each tensor rank has an equal part of the packed row's tokens. Attention and MLP gather the row.
Column-parallel layers take the same input on every rank and produce their part of the outputs. Row-parallel layers take those
parts; their outputs are summed, and each rank gets the sum for its own tokens. Layers compute on local tensors. Their parameters
are DTensors, which record the part of the whole tensor that each rank holds. The gradient of any other parameter is a sum over the
tensor ranks: each rank uses the parameter for its own tokens, heads or columns.
"""

from __future__ import annotations

import functools
import logging
import math
import re
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from transformers import (
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from asyncrl.architectures.adapters import A, Adapters, B, add_adapters
from asyncrl.architectures.attention import layers_of
from asyncrl.architectures.auto_class import auto_class
from asyncrl.architectures.checkpoint_names import Place, adopt_names, places_of
from asyncrl.architectures.states import modules_with_state
from asyncrl.architectures.towers import drop_towers
from asyncrl.config.schema import ConfigError, LoraConfig
from asyncrl.data.model_folder import check_shards, shard_path, weight_map
from asyncrl.dataflow.axes import MATRICES, PARTIALS
from asyncrl.model.attention import NAME as ATTENTION
from asyncrl.model.mesh import ModelMesh
from asyncrl.model.row_ranks import RowRanks
from asyncrl.model.shards import Box

logger = logging.getLogger(__name__)

# Least number of elements that FSDP gathers at once. A smaller model is one unit. On a CPU over gloo, 2 layers of hidden size 64
# took 1.1 times the CPU time of replicas with one all-reduce if they were one unit, and 1.4 times that time with one unit per
# layer, resharded after forward.
UNIT_ELEMENTS = 16_000_000
_PART_OF_LAYER = re.compile(r"(.+\.)?layers\.\*\.[^.]+")  # its name, with * for the number of the layer
_LOADING = threading.Lock()  # from_pretrained patches torch for the whole process while it builds the empty model


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of the tensor. With gradients enabled, they flow back into the DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> tuple[Box, Tensor]:
    """This rank's part of the tensor, and its box in the whole one. The part shares the tensor's memory."""
    if not isinstance(tensor, DTensor):
        return Box.whole(tensor.shape), tensor.detach()
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return Box(tuple(chunk.offsets), tuple(chunk.sizes)), tensor.to_local().detach()


# ------------------------------------------------------------------------------------------------------------- whole models


def load_config(path: str | Path, kind: str) -> PreTrainedConfig:
    """Load the config with all dropout of values and of layers disabled: logprobs must be deterministic."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path)
        parts = config, config.get_text_config()
    except (OSError, ValueError) as error:
        raise _cannot_be_loaded(path, error) from error
    for part in parts:
        for name, value in part.to_dict().items():
            if isinstance(value, float) and (name.endswith(("dropout", "_pdrop", "layerdrop")) or "dropout_" in name):
                setattr(part, name, 0.0)
    if kind != "lm":
        config.num_labels = 1
    return config


def load_whole(path: str | Path, kind: str, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Load the model on the CPU, in evaluation mode. A value model without an output layer gets a zero one. Raises ConfigError."""
    try:
        check_shards(Path(path))
        with _LOADING:
            loaded: Any = auto_class(config, kind).from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION,
                output_loading_info=True,
                use_safetensors=True,  # never unpickle
            )
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise _cannot_be_loaded(path, error) from error
    except KeyError as error:
        raise _no_attention(path, config) from error
    model: PreTrainedModel = loaded[0]
    drop_towers(model)
    lacking = sorted(loaded[1]["missing_keys"])  # transformers would initialise them randomly
    made = [name for name in lacking if may_lack(name, kind)]
    with torch.no_grad():
        for name in made:
            model.get_parameter(name).zero_()
    if lacking := [name for name in lacking if name not in made]:
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise ConfigError(
            f"model_path={str(path)!r}: its weights lack {', '.join(lacking[:3])}{more}, which a model of type "
            f"{config.model_type!r} has; copy the weights again, or the config.json that belongs to them"
        )
    embedding, output_layer = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if kind == "lm" and _is_tied(model.config) and output_layer.weight is not embedding.weight:
        raise _not_tied(path)  # transformers keeps two tensors apart whose values differ
    model.eval()  # type: ignore[no-untyped-call]
    return model


def make_model(kind: str, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model that load_whole loads, with weights as transformers initialises them."""
    model: PreTrainedModel = auto_class(config, kind).from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    drop_towers(model)
    model.eval()  # type: ignore[no-untyped-call]
    return model


def _is_tied(config: PreTrainedConfig) -> bool:
    return bool(getattr(config, "tie_word_embeddings", False))


def _not_tied(path: str | Path) -> ConfigError:
    return ConfigError(
        f"model_path={str(path)!r}: config.json says that the output layer is the embedding (tie_word_embeddings: true), but the "
        'weights have an output layer with other values; set "tie_word_embeddings": false in config.json'
    )


def may_lack(name: str, kind: str) -> bool:
    """Whether a checkpoint may lack this parameter. If it does, the parameter is zero."""
    return kind == "value" and name.startswith("score.")


def _cannot_be_loaded(path: str | Path, error: Exception) -> ConfigError:
    return ConfigError(f"model_path={str(path)!r}: the model cannot be loaded: {error}; copy it again, or give another")


def _no_attention(path: str | Path, config: PreTrainedConfig) -> ConfigError:
    return ConfigError(
        f"model_path={str(path)!r}: transformers has no replaceable attention for models of type {config.model_type!r}, so "
        "packed rows would mix their sequences. Use another model"
    )


# ------------------------------------------------------------------------------------------------------------ pieces of one


Slots = dict[str, tuple[nn.Module, str]]  # global name of a parameter -> its module, and its attribute there


def slots(model: nn.Module) -> Slots:
    """Slots of all parameters; tied ones occur once."""
    found: Slots = {}
    for name, _ in model.named_parameters():
        module, _, attribute = name.rpartition(".")
        found[name] = model.get_submodule(module), attribute
    return found


@dataclass
class Skeleton:
    """A model without weights, and the metadata of its parameters."""

    model: PreTrainedModel  # parameters on the meta device
    kind: str
    names: dict[
        tuple[nn.Module, str], str
    ]  # of each parameter in the whole model, by its slot; tied ones: the embedding's name
    split: set[str] = field(default_factory=set)  # parameters that are split over tensor ranks
    adapters: Adapters | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig, kind: str, dtype: torch.dtype) -> Skeleton:
        try:
            with _LOADING, torch.device("meta"):
                model = make_model(kind, config, dtype)
        except KeyError as error:
            raise _no_attention(config.name_or_path or "", config) from error
        names = {parameter: name for name, parameter in model.named_parameters()}
        of_slots = {
            (module, attribute): names[parameter]
            for module in model.modules()
            for attribute, parameter in module._parameters.items()
            if parameter is not None
        }
        return cls(model, kind, of_slots)

    def add_adapters(self, lora: LoraConfig, path: str) -> Adapters:
        """Raises ConfigError if the model cannot have them."""
        self.adapters = add_adapters(self.model, lora, path)
        for name in self.adapters.shapes:
            module, _, attribute = name.rpartition(".")
            self.names[self.model.get_submodule(module), attribute] = name
        return self.adapters

    @property
    def tied_name(self) -> str:
        """Name of the embedding if it is also the output layer, else ""."""
        embedding, output_layer = self.model.get_input_embeddings(), self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        return self.names[embedding, "weight"] if getattr(output_layer, "weight", None) is embedding.weight else ""


Read = Callable[[str, Box], Tensor]  # (name, box) -> this part of the tensor, in the dtype of the checkpoint


def open_weights(path: str | Path, skeleton: Skeleton, config: PreTrainedConfig, dtype: torch.dtype) -> Read:
    """Return a function that reads parts of the checkpoint's tensors.

    From safetensors files that have each tensor of the model, under its own or another name, it reads these parts and nothing else.
    Of experts that transformers fuses it reads those in the part. Any other checkpoint is loaded whole by each rank, and stays in
    memory as long as the function exists: a bare backbone.
    """
    shapes = {name: tensor.shape for name, tensor in skeleton.model.named_parameters()}
    shapes |= {name: tensor.shape for name, tensor in persistent_buffers(skeleton.model)}
    stored_files = stored_tensors(path)
    stored_names = adopt_names(skeleton.model, stored_files) if stored_files else {}
    files = {name: stored_files[stored] for name, stored in stored_names.items()}
    lacking = [name for name in shapes if name not in files and not may_lack(name, skeleton.kind)]
    fused = _fused(skeleton.model, shapes, lacking, stored_files)
    if fused.keys() != set(lacking):
        whole = load_whole(path, skeleton.kind, config, dtype).state_dict()
        return lambda name, box: whole[name][box.within(Box.whole(shapes[name]))]
    handles: dict[Path, Any] = {}
    embedding_name = skeleton.tied_name
    output_layer = skeleton.model.get_output_embeddings()  # type: ignore[no-untyped-call]
    output_name = next((f"{name}.weight" for name, m in skeleton.model.named_modules() if m is output_layer), "")

    def part_of(name: str, box: Box, shape: torch.Size) -> Tensor:
        file = files[name]
        try:
            if file not in handles:
                handles[file] = safe_open(file, framework="pt")
            stored = handles[file].get_slice(stored_names[name])
            if stored.get_shape() != list(shape):
                raise ConfigError(
                    f"model_path={str(path)!r}: {name} does not have the shape {list(shape)} given by config.json; "
                    "copy the weights again, or the config.json that belongs to them"
                )
            if not box.num_elements:
                return torch.empty(box.size)
            part: Tensor = (
                stored[box.within(Box.whole(shape))] if shape else handles[file].get_tensor(stored_names[name])
            )
        except (OSError, SafetensorError) as error:
            raise _cannot_be_loaded(path, error) from error
        return part

    def part_of_fused(name: str, box: Box) -> Tensor:
        """Experts of the box, each from its own tensors."""
        shape = shapes[name]
        first, count = box.start[0], box.size[0]
        result = torch.empty(0)
        for stored, place in fused[name]:
            if not first <= place.rows(shape)[0] < first + count:
                continue
            try:
                with safe_open(stored_files[stored], framework="pt") as handle:
                    tensor: Tensor = handle.get_tensor(stored)
            except (OSError, SafetensorError) as error:
                raise _cannot_be_loaded(path, error) from error
            if tensor.shape != place.shape:
                raise ConfigError(
                    f"model_path={str(path)!r}: {stored} does not have the shape {list(place.shape)} given by config.json; "
                    "copy the weights again, or the config.json that belongs to them"
                )
            if not result.numel():
                result = tensor.new_empty(count, *shape[1:])
            place.within_rows(result, first).copy_(tensor)
        whole = Box((first, *(0 for _ in shape[1:])), (count, *shape[1:]))
        return result[box.within(whole)] if result.numel() else torch.empty(box.size)

    def read(name: str, box: Box) -> Tensor:
        if name in fused:
            return part_of_fused(name, box)
        if name not in files:
            return torch.zeros(box.size)
        part = part_of(name, box, shapes[name])
        is_double = name == embedding_name and output_name in files
        if is_double and not torch.equal(part, part_of(output_name, box, shapes[name])):
            raise _not_tied(path)
        return part

    return read


def _fused(
    model: PreTrainedModel, shapes: Mapping[str, torch.Size], names: Sequence[str], stored: Container[str]
) -> dict[str, list[tuple[str, Place]]]:
    """Of those of these tensors whose entries along the first dimension are made of whole tensors of the checkpoint: these tensors.
    Experts are such entries."""
    if not names:
        return {}
    found: dict[str, list[tuple[str, Place]]] = {}
    others: set[str] = set()
    for name, place in places_of(model, shapes).items():
        if place.name not in names:
            continue
        begin, end = place.rows(shapes[place.name])
        if name not in stored or begin != end:
            others.add(place.name)
        found.setdefault(place.name, []).append((name, place))
    return {name: parts for name, parts in found.items() if name not in others}


def untrained_tensors(path: str | Path, model: PreTrainedModel, *, with_values: bool) -> dict[str, Tensor]:
    """Tensors of a language model's checkpoint that the model does not have, by name: towers, heads that predict several tokens.
    Each export has them unchanged. with_values: False: they have shapes and dtypes only.

    model: it may be on the meta device. Raises ConfigError if the checkpoint of a model with towers does not have the names that
    the trainer exports.
    """
    files = stored_tensors(path)
    own = places_of(model, {name: tensor.shape for name, tensor in model.state_dict().items()})
    exported = {**dict(model.named_parameters()), **dict(persistent_buffers(model))}
    other = [name for name in places_of(model, {name: t.shape for name, t in exported.items()}) if name not in files]
    config = AutoConfig.from_pretrained(path)
    if other and config.get_text_config() is not config:
        raise ConfigError(
            f"model_path={str(path)!r}: its weights are in another format than the trainer exports ({other[0]} is not there), so "
            "exported weights would lack the parts that are not for texts. Save the model again with the installed transformers"
        )
    found: dict[str, Tensor] = {}
    for name in [] if other else sorted(files.keys() - own.keys()):
        with safe_open(files[name], framework="pt") as handle:
            tensor: Tensor = handle.get_tensor(name)
        found[name] = tensor.clone() if with_values else tensor.to("meta")  # the file may change later
    return found


@dataclass(frozen=True)
class WeightSource:
    """The functions that an engine loads a model with."""

    load_whole: Callable[[str | Path, str, PreTrainedConfig, torch.dtype], PreTrainedModel]
    open_weights: Callable[[str | Path, Skeleton, PreTrainedConfig, torch.dtype], Read]
    load_config: Callable[[str | Path, str], PreTrainedConfig] = load_config
    has_values: bool = True  # False: the tensors have shapes and dtypes only (asyncrl/plan)


CHECKPOINT = WeightSource(load_whole, open_weights)


def stored_tensors(path: str | Path) -> dict[str, Path]:
    """Name of each tensor -> its file. Empty if the checkpoint has no safetensors files."""
    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(str(path), allow_patterns=["*.safetensors", "*.json"]))
        except (OSError, ValueError) as error:
            raise _cannot_be_loaded(path, error) from error
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    try:
        if index.is_file():
            return weight_map(folder)
        if not single.is_file():
            return {}
        shard_path(folder, single.name)
        with safe_open(single, framework="pt") as handle:
            return dict.fromkeys(handle.keys(), single)
    except (OSError, SafetensorError, ValueError, LookupError) as error:
        raise _cannot_be_loaded(path, error) from error


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    persistent = model.state_dict(keep_vars=True)
    return ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def fill_buffers(skeleton: Skeleton, read: Read, *, device: torch.device, path: str | Path) -> None:
    model = skeleton.model
    persistent = dict(persistent_buffers(model))
    for prefix, module in model.named_modules():
        own = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
        computed = []
        for name, buffer in own.items():
            full_name = f"{prefix}.{name}" if prefix else name
            if full_name in persistent:
                value = read(full_name, Box.whole(buffer.shape)).to(buffer.dtype)
            else:
                value = torch.full(buffer.shape, math.nan).to(buffer.dtype)
                computed.append(name)
            module._buffers[name] = value.clone()
        if computed:
            model._init_weights(module)  # type: ignore[no-untyped-call]  # computes rotary embeddings' buffers
        for name in computed:
            value = module._buffers[name]
            if value is None or (value.is_floating_point() and value.isnan().any()):
                raise ConfigError(
                    f"model_path={str(path)!r}: architecture {model.config.model_type!r} cannot be loaded in pieces "
                    f"({type(module).__name__}.{name} is computed in an unsupported way); use the grid d1p1m1"
                )
        for name, value in module._buffers.items():
            module._buffers[name] = None if value is None else value.to(device)


def fill(
    stage: nn.Module, skeleton: Skeleton, read: Read, *, dtype: torch.dtype, device: torch.device, path: str | Path
) -> Slots:
    """Read this rank's part of each parameter of the stage, which is cut to this rank and sharded. Returns their slots. Raises
    ConfigError for one that is tied to another FSDP unit's, and for values that are not numbers."""
    found: Slots = {}
    filled: dict[nn.Parameter, nn.Parameter] = {}
    adapters = skeleton.adapters
    of_adapter = adapters.start() if adapters is not None else None
    for module in stage.modules():
        own = {attribute: parameter for attribute, parameter in module._parameters.items() if parameter is not None}
        for attribute, parameter in own.items():
            if parameter not in filled:
                name = skeleton.names[module, attribute]
                if name in found:
                    raise ConfigError(f"model_path={str(path)!r}: layers share {name}; use the grid d1p1m1")
                found[name] = (module, attribute)
                box = local_part(parameter)[0]
                if of_adapter is not None and adapters is not None and name in adapters.shapes:
                    part = of_adapter(name)[box.within(Box.whole(parameter.shape))]
                    value = part.to(device, copy=True).contiguous()
                elif adapters is not None and name in adapters.heads:
                    value = _checked(name, read(name, box), torch.float32, device, path)
                else:
                    value = _checked(name, read(name, box), dtype, device, path)
                filled[parameter] = nn.Parameter(_like(parameter, value), requires_grad=parameter.requires_grad)
            own[attribute] = filled[parameter]
        if own:  # FSDP hears of it by a hook
            module.load_state_dict(own, strict=False, assign=True)
    return found


def _checked(name: str, part: Tensor, dtype: torch.dtype, device: torch.device, path: str | Path) -> Tensor:
    """A copy of what was read, on the device."""
    value = part.to(device)  # in the checkpoint's dtype: fewer bytes, and a device casts faster
    if value.isnan().any():
        raise ConfigError(
            f"model_path={str(path)!r}: its weights are broken: {name} in {stored_tensors(path).get(name, path)} contains NaN; "
            "copy them again"
        )
    return value.to(dtype, copy=part.device == device).contiguous()


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """A tensor that is split like the parameter, with this local part."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def split_evenly(size: int, parts: int, part: int) -> tuple[int, int]:
    """(start, length) of a part, as in DTensor's Shard: ceil(size / parts) each; the last parts may be shorter or empty."""
    length = -(-size // parts)
    start = min(part * length, size)
    return start, min(length, size - start)


# --------------------------------------------------------------------------------------------------------- tensor parallel


@dataclass(frozen=True)
class TensorRanks(RowRanks):
    """The tensor ranks of a replica, from the point of view of one of them."""

    vocab_start: int  # this rank's rows of the output layer begin at this word


def apply_tensor_parallel(skeleton: Skeleton, mesh: ModelMesh, path: str | Path) -> TensorRanks:
    """Split embedding, layers and output layer over the tensor group, and the rows of tokens between them. Raises ConfigError if
    they cannot be split."""
    model = skeleton.model
    plan: Mapping[str, str] = model._tp_plan or {}
    size, vocab = mesh.placement.grid.parts(MATRICES), model.config.get_text_config().vocab_size
    ranks = TensorRanks(
        mesh.group_that_sums(PARTIALS), mesh.parts[MATRICES], split_evenly(vocab, size, mesh.parts[MATRICES])[0]
    )
    output_layer = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embedding = model.get_input_embeddings()
    what = f"model_path={str(path)!r}: architecture {model.config.model_type!r}"
    remedy = f"use m1 in the grid of {mesh.placement.name!r} ({mesh.placement.grid})"
    if not any(".layers.*." in name for name in plan):
        raise ConfigError(f"{what} has no plan for tensor parallelism in transformers; {remedy}")
    _check_sizes(model, plan, size, what)
    # Modules that carry a state, and their parts: each rank computes them whole
    with_state = {part for module in modules_with_state(model).values() for part in module.modules()}
    dims: dict[Tensor, int] = {}  # the dimension that the tensor ranks split
    for name, module in model.named_modules():
        style = plan.get(_wildcard(name))
        if module is embedding:
            if type(module) is not nn.Embedding:
                raise ConfigError(f"{what} embeds with a {type(module).__name__}, which cannot be split; {remedy}")
            dims[module.weight] = 0
            _install_embedding(module, ranks, size)
        elif module is output_layer:
            dims |= dict.fromkeys(module.parameters(), 0)
        elif style in (None, "replicated_with_grad_allreduce"):
            continue
        elif module in with_state:
            if style != "colwise_gather_output":  # which has the result of a whole module
                raise ConfigError(f"{what} splits {name}, which carries a state, as {style!r}; {remedy}")
        elif style == "colwise" and isinstance(module, nn.Linear):
            dims |= {parameter: 0 for name, parameter in module.named_parameters() if name != A}
            _install_colwise(module)
        elif style == "rowwise" and isinstance(module, nn.Linear):
            dims |= {parameter: 1 for name, parameter in module.named_parameters() if name not in ("bias", B)}
            _install_rowwise(module, ranks)
            if skeleton.adapters is not None:
                skeleton.adapters.sums[module] = ranks.sum
        else:
            raise ConfigError(f"{what} splits {name} as {style!r}, which is not supported; {remedy}")
    for name, parameter in model.named_parameters():
        style = plan.get(_wildcard(name))
        if style is not None:
            raise ConfigError(
                f"{what} splits {name} {tuple(parameter.shape)} as {style!r}, which is not supported; {remedy}"
            )
    parts = {parameter: _part_without_values(parameter, dim, mesh) for parameter, dim in dims.items()}
    for (module, attribute), name in skeleton.names.items():
        if (part := parts.get(getattr(module, attribute))) is not None:
            setattr(module, attribute, part)
            skeleton.split.add(name)
    for module, is_split in _on_whole_rows(model, plan):
        module.register_forward_pre_hook(functools.partial(_gather_input, ranks), with_kwargs=True)
        if not is_split:
            module.register_forward_hook(functools.partial(_own_output, ranks))
    return ranks


def _part_without_values(parameter: Tensor, dim: int, mesh: ModelMesh) -> nn.Parameter:
    _, length = split_evenly(parameter.shape[dim], mesh.placement.grid.parts(MATRICES), mesh.parts[MATRICES])
    part = DTensor.from_local(
        parameter.detach().narrow(dim, 0, length).contiguous(),
        mesh.submesh(PARTIALS),
        [Shard(dim)],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(part)


def _wildcard(name: str) -> str:
    """Return the module's name as transformers' plans write it: `layers.*.mlp` for `layers.3.mlp`."""
    return re.sub(r"\.\d+(\.|$)", r".*\1", name)


def _on_whole_rows(model: PreTrainedModel, plan: Mapping[str, str]) -> Iterator[tuple[nn.Module, bool]]:
    """Yield the modules that take whole rows, and whether their matrices are split: each module with column-parallel layers, and
    every other child of a layer that has modules of its own, since it may mix tokens (attention that the plan leaves whole).
    Everything else computes token by token.
    """
    styles = {name: _wildcard(name) for name, _ in model.named_modules()}
    split = [name for name, wildcard in styles.items() if plan.get(wildcard) in ("colwise", "rowwise")]
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in split if plan[styles[name]] == "colwise"):
        yield model.get_submodule(parent), True
    for name, wildcard in styles.items():
        child = model.get_submodule(name)
        is_part = _PART_OF_LAYER.fullmatch(wildcard) is not None and any(child.children())
        if is_part and not any(other.startswith(f"{name}.") for other in split):
            yield child, False


def _check_sizes(model: PreTrainedModel, plan: Mapping[str, str], tensor_size: int, what: str) -> None:
    """Check that the tensor ranks divide the attention heads, the key heads and the width of the MLPs evenly."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    sizes = {"attention heads": heads, "key heads": getattr(config, "num_key_value_heads", None) or heads}
    for name, module in model.named_modules():
        style = plan.get(_wildcard(name))
        if isinstance(module, nn.Linear) and style in ("colwise", "rowwise") and ".mlp." in name:
            sizes["width of the MLP"] = module.out_features if style == "colwise" else module.in_features
    if bad := [f"{size} {name}" for name, size in sizes.items() if size % tensor_size]:
        common = math.gcd(*sizes.values())
        fitting = ", ".join(f"m{m}" for m in range(1, common + 1) if common % m == 0)
        raise ConfigError(f"{what} has {' and '.join(bad)}, which m{tensor_size} cannot split; {fitting} would fit")


def _gather_input(ranks: TensorRanks, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The hidden states are the first argument, by their place or by name."""
    if args:
        return (ranks.gather(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": ranks.gather(kwargs["hidden_states"])}


def _own_output(ranks: TensorRanks, _: nn.Module, __: object, output: Any) -> Any:
    return (ranks.own(output[0]), *output[1:]) if isinstance(output, tuple) else ranks.own(output)


def _replace_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
    module.forward = forward


def _install_colwise(layer: nn.Linear) -> None:
    def forward(row: Tensor) -> Tensor:
        bias = None if layer.bias is None else local_tensor(layer.bias)
        return functional.linear(row, local_tensor(layer.weight), bias)

    _replace_forward(layer, forward)


def _install_rowwise(layer: nn.Linear, ranks: TensorRanks) -> None:
    def forward(row: Tensor) -> Tensor:
        part = ranks.sum(functional.linear(row, local_tensor(layer.weight)))
        return part if layer.bias is None else part + layer.bias.to(part.dtype)

    _replace_forward(layer, forward)


def _install_embedding(embedding: nn.Embedding, ranks: TensorRanks, num_parts: int) -> None:
    """Each rank looks up the tokens whose rows it holds, with zeros for the others; then the ranks' results are summed."""
    start, length = split_evenly(embedding.num_embeddings, num_parts, ranks.part)
    padding = embedding.padding_idx  # its row gets no gradient
    own_padding = padding - start if padding is not None and start <= padding < start + length else None

    def forward(input_ids: Tensor) -> Tensor:
        local_ids = input_ids - start
        inside = (local_ids >= 0) & (local_ids < length)
        weight = local_tensor(embedding.weight)
        found = functional.embedding(torch.where(inside, local_ids, 0), weight, own_padding)
        return ranks.sum(torch.where(inside[..., None], found, 0.0))

    _replace_forward(embedding, forward)


# ----------------------------------------------------------------------------------------------------------- data parallel


def shard_units(model: PreTrainedModel) -> list[list[nn.Module]]:
    """Layers in groups of at least UNIT_ELEMENTS elements, counted before the data ranks split them. The last group may have fewer.
    Empty if there is only one group."""
    units: list[list[nn.Module]] = [[]]
    elements = 0
    for layer in layers_of(model):
        units[-1].append(layer)
        elements += sum(parameter.numel() for parameter in layer.parameters())
        if elements >= UNIT_ELEMENTS:
            units.append([])
            elements = 0
    if not units[-1]:
        units.pop()
    return units if len(units) > 1 else []


def apply_data_parallel(
    modules: nn.Module | list[nn.Module], mesh: DeviceMesh, dtype: torch.dtype | None, *, casts_inputs: bool = True
) -> None:
    """Apply fully_shard with summed gradients. mesh: of the ranks that sum them. dtype: of the computation; None: that of the
    parameters."""
    policy = MixedPrecisionPolicy(cast_forward_inputs=casts_inputs)
    if dtype is not None:
        policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=casts_inputs)
    fully_shard(modules, mesh=mesh, mp_policy=policy)
    first = modules[0] if isinstance(modules, list) else modules
    assert isinstance(first, FSDPModule)
    # Losses are already divided by the global denominator. A plain sum is also the only reduction that gloo supports.
    first.set_gradient_divide_factor(1.0)
    first.set_force_sum_reduction_for_comms(True)
