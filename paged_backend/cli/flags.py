"""Sampling and engine options as command-line flags, shared by every command that takes them."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from paged_backend.config import EngineConfig
from paged_backend.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Flag:
    """One option. name: its spelling where it differs from the field's. parse: from the text given to the value."""

    type: Any
    help: str
    name: str | None = None
    parse: Callable[[Any], Any] = lambda value: value


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"expected a JSON object, got {text!r} ({error})") from None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"expected a JSON object, got {text!r}")
    return value


SAMPLING: Mapping[str, Flag] = {
    "n": Flag(int, "Answers per prompt, sampled from one shared prompt."),
    "temperature": Flag(float, "0 is greedy. Default: the model's, else 1."),
    "top_p": Flag(float, "Sample from the most likely tokens with this total probability."),
    "top_k": Flag(int, "Sample from this many most likely tokens; 0 for all."),
    "min_p": Flag(float, "Least probability, relative to the most likely token."),
    "repetition_penalty": Flag(float, "Above 1 makes tokens of the prompt and the answer less likely."),
    "presence_penalty": Flag(float, "Subtracted once from tokens the answer has."),
    "frequency_penalty": Flag(float, "Subtracted from tokens for each time the answer has them."),
    "seed": Flag(int, "Same seed, same answer, whatever else is in the batch."),
    "max_tokens": Flag(int, "Most new tokens. Default: the model's, else 256."),
    "min_tokens": Flag(int, "No stop before this many new tokens."),
    "stop": Flag(list[str], "Text that ends the answer; may be repeated."),
    "stop_token_ids": Flag(list[int], "Token id that ends the answer; may be repeated."),
    "include_stop_str_in_output": Flag(bool, "Keep the stop text at the end of the answer."),
    "ignore_eos": Flag(bool, "Go on past the model's end of sequence."),
    "logprobs": Flag(int, "Report logprobs of the answer, with this many alternatives per token."),
    "prompt_logprobs": Flag(int, "The same for the prompt."),
    "logit_bias": Flag(str, 'JSON object {"token id": bias}.', parse=_json_object),
    "allowed_token_ids": Flag(list[int], "Sample nothing but these ids; may be repeated."),
    "bad_words": Flag(list[str], "Text that is never produced; may be repeated."),
    "structured_outputs": Flag(
        str,
        'Form of the answer, a JSON object such as {"regex": "yes|no"} or {"json": {...}}.',
        parse=_json_object,
    ),
    "skip_special_tokens": Flag(bool, "Leave special tokens out of the text (the default)."),
    "priority": Flag(int, "Lower runs earlier."),
}
"""Every field of SamplingParams that a command line can say; how a stream is cut is the command's own business."""

ENGINE: Mapping[str, Flag] = {
    "tokenizer": Flag(str, "Folder or hub id of another tokenizer."),
    "device": Flag(str, "Where the model runs: cpu or cuda."),
    "dtype": Flag(str, "How weights are stored: auto, float32, bfloat16 or float16 (GPU)."),
    "kernels": Flag(str, "auto, c (an error if they cannot be built), reference (numpy) or triton (GPU)."),
    "quantization": Flag(str, "Weights in int8 or int4 instead of the checkpoint's precision."),
    "matmul_precision": Flag(
        str,
        "Of activations, where the CPU multiplies fewer bits faster: highest, high (16 bits), medium (bf16; 8 bits).",
    ),
    "kv_cache_dtype": Flag(
        str, "Keys and values in float32, bfloat16, int8, float16 (GPU); auto: bfloat16 with quantization."
    ),
    "max_model_len": Flag(int, "Longest prompt + answer in tokens. Default: the model's context."),
    "block_size": Flag(int, "Tokens per KV block."),
    "num_blocks": Flag(int, "Size of the KV pool in blocks."),
    "kv_cache_memory": Flag(int, "Size of the KV pool in bytes. Default: up to a quarter of the memory."),
    "kv_cache_idle_timeout": Flag(
        float,
        "Seconds without work until the memory of cached prefixes is given back; 0 keeps it. Default: 300.",
    ),
    "max_num_seqs": Flag(int, "Most requests in one step."),
    "max_num_batched_tokens": Flag(int, "Most tokens in one step."),
    "enable_prefix_caching": Flag(bool, "Share the KV of equal prompt beginnings (the default)."),
    "threads": Flag(int, "Compute threads. Default: OMP_NUM_THREADS, else one for each physical core."),
    "seed": Flag(int, "Makes requests without a seed of their own reproducible.", name="engine-seed"),
}
"""Every field of EngineConfig but the model, which is an argument, and trust_remote_code, which is always refused."""

_GROUPS = {"sampling": ("Sampling", SAMPLING), "engine": ("Engine", ENGINE)}


def with_flags(*groups: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: the command's parameters named in ``groups`` become flags and arrive as a dict of those given."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        parameters = [p for name, p in own.items() if name not in groups]
        fields: dict[str, tuple[str, str, Flag]] = {}
        for group in groups:
            panel, flags = _GROUPS[group]
            for field, flag in flags.items():
                name = (flag.name or field).replace("-", "_")
                fields[name] = (group, field, flag)
                spelling = "--" + name.replace("_", "-")
                if flag.type is bool:
                    spelling += "/--no-" + name.replace("_", "-")
                option = typer.Option(spelling, help=flag.help, rich_help_panel=panel, show_default=False)
                parameters.append(
                    inspect.Parameter(
                        name,
                        inspect.Parameter.KEYWORD_ONLY,
                        default=None,
                        annotation=Annotated[flag.type | None, option],
                    )
                )

        @functools.wraps(command)
        def call(**values: Any) -> None:
            picked: dict[str, dict[str, Any]] = {group: {} for group in groups}
            for name, (group, field, flag) in fields.items():
                value = values.pop(name)
                if value is not None and value != []:
                    picked[group][field] = flag.parse(value)
            command(**values, **picked)

        # typer reads these two to learn the options
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        return call

    return decorate


def sampling_params(given: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams from flags or a line's ``params``. Raises ValueError naming what is wrong."""
    import difflib

    allowed = list(SAMPLING)
    for name in given:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known ones: {', '.join(allowed)}"
            raise ValueError(f"unknown sampling parameter {name!r}; {hint}")
    return SamplingParams(**given)


def checked_config(model: str, given: Mapping[str, Any]) -> None:
    """Refuse bad engine flags as a usage error, before anything heavy is loaded."""
    try:
        EngineConfig.from_options(model, **given)
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error


def checked_params(given: Mapping[str, Any]) -> None:
    """Refuse bad sampling flags as a usage error, before anything heavy is loaded."""
    try:
        sampling_params(given)
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
