"""From what the user named to a decoder that runs: resolve, map the files, check, pack."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paged_backend.checkpoints.checkpoint import Checkpoint, TensorSource
from paged_backend.config import EngineConfig
from paged_backend.errors import ModelLoadError, UnsupportedModelError
from paged_backend.folders import hub_cache
from paged_backend.kernels.base import Kernels
from paged_backend.models.architectures import spec_from_config
from paged_backend.models.decoder import Decoder
from paged_backend.models.spec import DecoderSpec
from paged_backend.models.tensors import fit

if TYPE_CHECKING:
    from paged_backend.checkpoints.gguf_quants import Expand

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w-]+")
_HUB_FILES = ("*.safetensors", "*.json", "tokenizer*", "*.model", "vocab*", "merges.txt", "*.jinja")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. max_model_len: longest prompt + output it serves.

    decoder: native, or a ``TransformersModel``. spec: as the weights really are (see ``fit``).
    tokenizer_source: the tokenizer asked for, or else that of the checkpoint.
    """

    decoder: Any
    spec: DecoderSpec
    checkpoint: Checkpoint
    tokenizer_source: str
    max_model_len: int

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a sequence, from the generation config (a number or a list), else the config."""
        eos = self.checkpoint.generation_config.get("eos_token_id")
        if eos is None:
            return self.spec.eos_token_ids
        return tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)


def load_model(config: EngineConfig, kernels: Kernels) -> LoadedModel:
    """Load ``config.model`` for ``kernels``.

    What has no native implementation runs through its transformers module (see ``transformers_model``) if it comes
    as safetensors. Raises ModelLoadError naming the file, tensor or setting (UnsupportedModelError if it has no
    implementation), and ValueError for a weight dtype the kernels do not have.
    """
    return build_model(config, kernels, load_checkpoint(resolve_model(config.model), kernels.expand_gguf))


def build_model(
    config: EngineConfig, kernels: Kernels, checkpoint: Checkpoint, through_transformers: bool = True
) -> LoadedModel:
    """:func:`load_model` for a checkpoint that is open already; only natively without ``through_transformers``."""
    try:
        spec = spec_from_config(checkpoint.config)
    except UnsupportedModelError as refusal:
        if not through_transformers or checkpoint.path.suffix == ".gguf":
            raise
        return _through_transformers(config, kernels, checkpoint, refusal)
    spec, weights = fit(checkpoint, spec)
    max_model_len = _context(config, spec, checkpoint)
    decoder = Decoder(spec, weights, kernels, config.quantization or config.dtype, max_model_len)
    return _loaded(config, decoder, checkpoint, max_model_len)


def _through_transformers(
    config: EngineConfig, kernels: Kernels, checkpoint: Checkpoint, refusal: UnsupportedModelError
) -> LoadedModel:
    from paged_backend.models.transformers.module import load_module

    try:
        dtype = config.activation_dtype if config.through_triton else config.dtype
        module = load_module(checkpoint, config.quantization or dtype)
        return module_model(config, kernels, checkpoint, module.to(kernels.device))
    except UnsupportedModelError as second:
        raise UnsupportedModelError(f"{refusal}; nor does it run through transformers: {second}") from second


def module_model(config: EngineConfig, kernels: Kernels, checkpoint: Checkpoint, module: Any) -> LoadedModel:
    """A transformers module as a model to serve; it is taken over. Raises UnsupportedModelError."""
    from paged_backend.models.transformers.model import TransformersModel

    model = TransformersModel(module, kernels)
    return _loaded(config, model, checkpoint, _context(config, model.spec, checkpoint))


def _context(config: EngineConfig, spec: DecoderSpec, checkpoint: Checkpoint) -> int:
    max_model_len = config.max_model_len or spec.max_position
    if max_model_len > spec.max_position_limit:
        raise ModelLoadError(
            f"max_model_len {max_model_len} is beyond what {checkpoint.path} supports: "
            f"at most {spec.max_position_limit}"
        )
    return max_model_len


def _loaded(config: EngineConfig, model: Any, checkpoint: Checkpoint, max_model_len: int) -> LoadedModel:
    return LoadedModel(
        decoder=model,
        spec=model.spec,
        checkpoint=checkpoint,
        tokenizer_source=config.tokenizer or checkpoint.tokenizer_source,
        max_model_len=max_model_len,
    )


def resolve_model(model: str, files: Sequence[str] = _HUB_FILES) -> Path:
    """Folder or .gguf file of what the user named: a path, ``demo``, or a hub id (downloaded on first use).

    files: patterns of those that are needed. A folder of that name wins over a hub id. Raises ModelLoadError.
    """
    path = Path(os.path.expanduser(model))
    if path.exists():
        return path.resolve()
    if model == "demo":
        from paged_backend.checkpoints import gguf

        return gguf.demo_path()
    if path.suffix == ".gguf" or model.startswith((".", "/", "~")):
        kind = "file" if path.suffix == ".gguf" else "folder"
        raise ModelLoadError(f"there is no {kind} {model!r}")
    if not _HUB_ID.fullmatch(model):
        raise ModelLoadError(
            f"no model at {model!r}: give a folder with safetensors, a .gguf file, a hub id or 'demo'"
        )
    if difflib.get_close_matches(model.lower(), ["demo"], cutoff=0.7):  # no model on the hub has such a name
        raise ModelLoadError(f"there is no model {model!r}: did you mean 'demo'?")
    return _download(model, files)


def load_config(model: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The content of a model's ``config.json`` and ``generation_config.json``. Raises ModelLoadError."""
    path = resolve_model(model, ("config.json", "generation_config.json"))
    if path.suffix == ".gguf":
        checkpoint = load_checkpoint(path)
        return checkpoint.config, checkpoint.generation_config
    return _read_configs(path)


def load_checkpoint(path: Path, expand: Expand | None = None) -> Checkpoint:
    """Config and lazily read tensors of a safetensors folder or a .gguf file. Raises ModelLoadError.

    expand: a faster way to expand packed GGUF tensors, as a kernel backend has it.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        from paged_backend.checkpoints import gguf

        return gguf.load_gguf(path, expand)
    if not path.exists():
        raise ModelLoadError(f"no model folder at {path}")
    if not path.is_dir():
        raise ModelLoadError(
            f"{path} is neither a folder nor a .gguf file; give the folder that holds config.json"
        )
    config, generation_config = _read_configs(path)
    sources: dict[str, TensorSource] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    integers: dict[str, tuple[str, TensorSource]] = {}
    for shard, names in _shards(path).items():
        _map_shard(path / shard, names, sources, shapes, integers)
    return Checkpoint(
        config=config,
        tensors=sources,
        shapes=shapes,
        generation_config=generation_config,
        path=path,
        tokenizer_source=str(path),
        integers=integers,
    )


def _read_configs(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    config = _read_json(path / "config.json", f"{path} has no config.json, so it is not a model folder")
    generation = path / "generation_config.json"
    return config, _read_json(generation, "") if generation.exists() else {}


def _shards(path: Path) -> dict[str, list[str]]:
    """Safetensors files of a folder, with the tensors the index promises in each."""
    if (path / WEIGHTS).exists():
        return {WEIGHTS: []}
    if (path / INDEX).exists():
        weight_map = _read_json(path / INDEX, "").get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelLoadError(f"{path / INDEX} has no weight_map")
        shards: dict[str, list[str]] = {}
        for name, shard in weight_map.items():
            # an index is downloaded data: it may not point outside of its folder
            if not isinstance(shard, str) or os.path.basename(shard) != shard:
                raise ModelLoadError(
                    f"{path / INDEX} places tensor {name!r} in {shard!r}, which is no plain file name"
                )
            shards.setdefault(shard, []).append(name)
        for shard in shards:
            if not (path / shard).exists():
                raise ModelLoadError(
                    f"{path / INDEX} names {shard!r}, but that file is missing: download it again"
                )
        return shards
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in path.glob(pattern))
    if pickles:
        raise ModelLoadError(
            f"{path} has only pickled weights ({pickles[0]}), which can run code when read and are "
            "refused: convert them with transformers, "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    raise ModelLoadError(f"{path} has no weights: neither {WEIGHTS} nor {INDEX}")


def _map_shard(
    file: Path,
    promised: list[str],
    sources: dict[str, TensorSource],
    shapes: dict[str, tuple[int, ...]],
    integers: dict[str, tuple[str, TensorSource]],
) -> None:
    """Add the tensors of one memory-mapped file, those that are no floats to ``integers``; only its header is read."""
    from safetensors import SafetensorError, safe_open

    try:
        mapped: Any = safe_open(file, framework="pt")
        names = list(mapped.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelLoadError(f"{file} is damaged or cut short ({error}): download it again") from error
    for name in promised:
        if name not in names:
            raise ModelLoadError(
                f"{file.parent / INDEX} places tensor {name!r} in {file.name!r}, which does not have it"
            )
    for name in names:
        view = mapped.get_slice(name)
        if view.get_dtype() not in ("F64", "F32", "F16", "BF16"):
            integers[name] = view.get_dtype(), partial(mapped.get_tensor, name)
            continue
        sources[name] = partial(mapped.get_tensor, name)
        shapes[name] = tuple(view.get_shape())


def _read_json(file: Path, missing: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(missing) from error
    except (ValueError, OSError) as error:
        raise ModelLoadError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} must hold a JSON object")
    return content


def _download(model: str, files: Sequence[str]) -> Path:
    """Fetch a hub repository (weights as safetensors only) or find it in the local cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=list(files), cache_dir=hub_cache()))
    except HFValidationError as error:
        raise ModelLoadError(f"{model!r} is neither an existing path nor a valid hub id: {error}") from error
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(
            f"{model!r} is not in the local cache and the hub cannot be reached: check the network, "
            "or give a local folder"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelLoadError(f"downloading {model!r} from the hub failed: {error}") from error
