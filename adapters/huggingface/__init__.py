"""Hugging Face transformers on the shared engine: change one line, keep the rest.

    from paged_backend.adapters.huggingface import PagedModelForCausalLM     # instead of AutoModelForCausalLM
    model = PagedModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
    model.generate(**inputs, max_new_tokens=50)

    from paged_backend.adapters.huggingface import pipeline                  # instead of transformers' pipeline
    pipe = pipeline("text-generation", model="HuggingFaceTB/SmolLM2-135M-Instruct")
    pipe(["one prompt", "another"])                                          # both run in one continuous batch

    from paged_backend.adapters.huggingface import accelerate
    accelerate(model)                                                        # a transformers model in memory already

The models stay instances of their own classes. ``generate`` takes every argument that it takes in
transformers; what the engine cannot do runs on transformers' own implementation, with one log line saying
why.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paged_backend.errors import missing_extra

if TYPE_CHECKING:
    from paged_backend.adapters.huggingface.text_generation import PagedTextGenerationPipeline

__all__ = ["PagedModelForCausalLM", "PagedTextGenerationPipeline", "accelerate", "load_tokenizer", "pipeline"]

_LOADING = ("revision", "token", "dtype", "torch_dtype", "device_map", "trust_remote_code", "config")
"""Arguments of transformers' ``pipeline`` that say how a model is loaded."""

_WHERE = ("revision", "token", "cache_dir", "local_files_only", "force_download", "subfolder")
"""Those that its tokenizer is loaded with as well."""


with missing_extra("huggingface", "this adapter"):
    for _package in ("torch", "transformers"):  # looked for only: to import them takes seconds
        if find_spec(_package) is None:
            raise ModuleNotFoundError(name=_package)


class PagedModelForCausalLM:
    """Made like ``AutoModelForCausalLM``, with :meth:`from_pretrained`."""

    def __init__(self) -> None:
        raise OSError(
            "PagedModelForCausalLM is made with PagedModelForCausalLM.from_pretrained(name_or_path)"
        )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> Any:
        """A model of its own transformers class whose ``generate`` runs on the engine, which alone holds its weights.

        pretrained_model_name_or_path: a folder with safetensors, a hub id, a ``.gguf`` file or ``demo``.
        options: fields of :class:`EngineConfig` (``kernels``, ``max_num_seqs``, ``quantization``, ...), and
        of transformers: ``dtype`` (``"auto"``, float32, bfloat16: how weights are stored, math is float32),
        ``revision``, ``cache_dir``, ``token``, ``local_files_only``, ``force_download``, ``subfolder``,
        ``gguf_file``, ``device_map`` (the CPU), ``attn_implementation`` (of the module, when something needs
        it), ``generation_config``.

        The engine is shared with all others in this process that name the same model. The torch module is
        loaded when it is first used: ``model(...)``, ``state_dict``, ``save_pretrained``, a ``generate`` that
        the engine cannot do. Raises :class:`ModelLoadError`, ``TypeError`` for an unknown option,
        ``ValueError`` for one that cannot be honoured.
        """
        from paged_backend.adapters.huggingface.loading import from_pretrained

        return from_pretrained(pretrained_model_name_or_path, **options)


def accelerate(model: Any, *, weights: str = "pack", **options: Any) -> Any:
    """Make a transformers model in memory generate with an engine of its own; returns that same object.

    weights: ``"pack"`` gives the engine a copy in its kernels' layout where it supports the architecture natively, the
    fastest way; ``"share"`` runs the module's own parameters, so that nothing is held twice. Other
    architectures always share. options: fields of :class:`EngineConfig`.

    Weights that change later (training, ``load_state_dict``, a merged adapter) are noticed at the next call
    and the engine is built anew; with injected adapters ``generate`` runs on transformers' own
    implementation. Raises TypeError or ValueError for what cannot generate here, UnsupportedModelError for an
    architecture that cannot be paged.
    """
    from paged_backend.adapters.huggingface.loading import accelerate

    return accelerate(model, weights=weights, **options)


def pipeline(task: str | None = None, model: Any = None, tokenizer: Any = None, **options: Any) -> Any:
    """transformers' ``pipeline("text-generation", ...)`` on the engine: same arguments, same results.

    model: what :meth:`PagedModelForCausalLM.from_pretrained` takes, or a transformers model (see
    :func:`accelerate`). tokenizer: None takes the model's. options: those of transformers' ``pipeline`` and
    fields of :class:`EngineConfig`. Raises ValueError for another task, and for what says how a model is to
    be loaded beside a model that is.
    """
    import transformers

    from paged_backend.adapters.huggingface.loading import ENGINE_OPTIONS, check_loading
    from paged_backend.adapters.huggingface.model import PagedGeneration
    from paged_backend.adapters.huggingface.text_generation import PagedTextGenerationPipeline

    if task not in (None, "text-generation"):
        raise ValueError(
            f"task {task!r}: only 'text-generation' runs on the engine; use transformers.pipeline for others"
        )
    if model is None:
        raise ValueError("give a model: a folder, a hub id, a .gguf file, 'demo' or a transformers model")
    place = options.pop("device", None)
    if str(-1 if place is None else place) not in ("-1", "cpu", "cpu:0"):
        raise ValueError(f"device={place!r}: the engine runs on the CPU; use 'cpu' or leave it out")
    ours = {name: options.pop(name) for name in list(options) if name in ENGINE_OPTIONS}
    passed = {name: options.pop(name) for name in _LOADING if options.get(name) is not None}
    passed.update(options.pop("model_kwargs", None) or {})
    hub = {name: passed[name] for name in _WHERE if name in passed}
    if "use_fast" in options:
        hub["use_fast"] = options.pop("use_fast")
    if isinstance(model, (str, Path)):
        name, model = str(model), PagedModelForCausalLM.from_pretrained(model, **passed, **ours)
        if tokenizer is None:
            file = passed.get("gguf_file")
            tokenizer = load_tokenizer(f"{name}/{file}" if file else name, model, **hub)
    else:
        check_loading(model, {key: value for key, value in passed.items() if key not in hub})
        if not isinstance(model, PagedGeneration):
            model = accelerate(model, **ours)
        elif ours:
            raise ValueError(f"{', '.join(ours)}: engine options are given when the model is made")
    if tokenizer is None and model.name_or_path:
        tokenizer = load_tokenizer(model.name_or_path, model, **hub)
    options.setdefault("pipeline_class", PagedTextGenerationPipeline)
    return transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu", **options)


def load_tokenizer(name: str, model: Any = None, **options: Any) -> Any:
    """The transformers tokenizer of a model name, also where it lies in a GGUF file (or is ``demo``).

    model: the paged model, if there is one, so that the file is not read again. options: for ``AutoTokenizer``.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if name != "demo" and not name.endswith(".gguf"):
        from paged_backend.folders import hub_cache

        return AutoTokenizer.from_pretrained(name, **{"cache_dir": hub_cache(), **options})
    from paged_backend.text.tokenizer import load_tokenizer

    if options.get("use_fast") is False:
        raise ValueError("use_fast=False: the tokenizer of a GGUF file is a fast one")
    own = {key: value for key, value in options.items() if key not in (*_WHERE, "use_fast")}
    found = model.engine.tokenizer if model is not None else load_tokenizer(name)
    made = PreTrainedTokenizerFast(
        **{
            "tokenizer_object": found.backend,
            "clean_up_tokenization_spaces": False,
            "name_or_path": name,
            **found.named_tokens,
            **own,
        }
    )
    made.chat_template = found.templates if len(found.templates) > 1 else found.chat_template
    return made


def __getattr__(name: str) -> Any:
    if name == "PagedTextGenerationPipeline":  # its base class takes seconds to import
        from paged_backend.adapters.huggingface.text_generation import PagedTextGenerationPipeline

        return PagedTextGenerationPipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
