"""transformers' logits processors and stopping criteria, run on one row of a batch by the engine.

The very objects that ``generate`` would have used do the work, on that row's part of what they would have
seen, padding included. So their results are transformers' own, whatever the option.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.generation import logits_process as lp
from transformers.generation import stopping_criteria as sc

ROW_PROCESSORS = (
    lp.MinLengthLogitsProcessor,
    lp.MinNewTokensLengthLogitsProcessor,
    lp.TemperatureLogitsWarper,
    lp.RepetitionPenaltyLogitsProcessor,
    lp.EncoderRepetitionPenaltyLogitsProcessor,
    lp.TopPLogitsWarper,
    lp.TopKLogitsWarper,
    lp.TopHLogitsWarper,
    lp.MinPLogitsWarper,
    lp.TypicalLogitsWarper,
    lp.EpsilonLogitsWarper,
    lp.EtaLogitsWarper,
    lp.NoRepeatNGramLogitsProcessor,
    lp.EncoderNoRepeatNGramLogitsProcessor,
    lp.SequenceBiasLogitsProcessor,
    lp.NoBadWordsLogitsProcessor,
    lp.PrefixConstrainedLogitsProcessor,
    lp.ForcedBOSTokenLogitsProcessor,
    lp.ForcedEOSTokenLogitsProcessor,
    lp.InfNanRemoveLogitsProcessor,
    lp.ExponentialDecayLengthPenalty,
    lp.LogitNormalization,
    lp.SuppressTokensAtBeginLogitsProcessor,
    lp.SuppressTokensLogitsProcessor,
    lp.WatermarkLogitsProcessor,
)
"""Processors whose result for a row depends on that row alone, and that remember nothing."""

ROW_CRITERIA = (
    sc.MaxLengthCriteria,
    sc.MaxTimeCriteria,
    sc.StopStringCriteria,
    sc.EosTokenCriteria,
)

_WARPERS = (
    lp.TemperatureLogitsWarper,
    lp.TopKLogitsWarper,
    lp.TopPLogitsWarper,
    lp.MinPLogitsWarper,
)
"""What the engine's own sampler does, in the order in which it does it."""


class PreparedProcessors(lp.LogitsProcessorList):
    """What ``generate`` prepared for its batch, and how to prepare the same for one row.

    build: ``_get_logits_processor`` of transformers. arguments: those it was called with for the batch.
    """

    def __init__(
        self, processors: Sequence[Any], build: Callable[..., Sequence[Any]], arguments: dict[str, Any]
    ) -> None:
        super().__init__(processors)
        self._build = build
        self._arguments = arguments

    @property
    def custom(self) -> list[Any]:
        """Those that a row cannot run by itself."""
        given = self._arguments["logits_processor"] or ()
        whole = [p for p in given if getattr(getattr(p, "prompt_ignore_length", None), "ndim", 0)]
        return [*(processor for processor in self if type(processor) not in ROW_PROCESSORS), *whole]

    def for_row(self, row: int, copies: int) -> list[Any]:
        """The processors of row ``row`` of the expanded batch, in which each prompt stands ``copies`` times."""
        arguments = dict(self._arguments)
        config = copy.copy(arguments["generation_config"])
        config.num_beams = config.num_return_sequences = 1
        prompt = row // copies
        inputs = arguments["encoder_input_ids"]
        kwargs = dict(arguments["model_kwargs"] or {})
        if kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = kwargs["attention_mask"][row : row + 1]
        allowed = arguments["prefix_allowed_tokens_fn"]
        arguments.update(
            generation_config=config,
            encoder_input_ids=inputs[prompt : prompt + 1],
            model_kwargs=kwargs,
            prefix_allowed_tokens_fn=None if allowed is None else lambda _, ids: allowed(prompt, ids),
        )
        return list(self._build(**arguments))


def split_warpers(processors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """(what must run as it is, the rest as fields of ``SamplingParams``) of a row's processors."""
    rest = list(processors)
    fields: dict[str, Any] = {}
    place = len(_WARPERS)
    while rest and type(rest[-1]) in _WARPERS[:place]:
        warper = rest[-1]
        place = _WARPERS.index(type(warper))
        keeps_more = getattr(warper, "min_tokens_to_keep", 1) != 1
        if keeps_more or getattr(warper, "filter_value", -float("inf")) != -float("inf"):
            break
        if isinstance(warper, lp.TemperatureLogitsWarper):
            fields["temperature"] = float(warper.temperature)
        elif isinstance(warper, lp.TopKLogitsWarper):
            fields["top_k"] = int(warper.top_k)
        elif isinstance(warper, lp.TopPLogitsWarper):
            fields["top_p"] = float(warper.top_p)
        else:
            fields["min_p"] = float(warper.min_p)
        rest.pop()
    return rest, fields


def split_penalty(processors: Sequence[Any], padding: int) -> tuple[list[Any], dict[str, Any]]:
    """As :func:`split_warpers` for a repetition penalty that stands alone: the engine has that one too.

    padding: tokens before the prompt in the row; the engine's penalty never sees them, so it must leave out just these.
    """
    if len(processors) != 1 or type(processors[0]) is not lp.RepetitionPenaltyLogitsProcessor:
        return list(processors), {}
    left_out = getattr(processors[0], "prompt_ignore_length", None)
    if int(0 if left_out is None else left_out) != padding:
        return list(processors), {}
    return [], {"repetition_penalty": float(processors[0].penalty)}


class RowProcessor:
    """A :data:`LogitsProcessor` of the engine that runs transformers' processors.

    prefix: int64 [L], the row as ``generate`` holds it, left padding included.
    """

    def __init__(self, prefix: Tensor, processors: Sequence[Any]) -> None:
        self._prefix = prefix
        self._processors = lp.LogitsProcessorList(processors)

    def __call__(self, prompt: Sequence[int], output: Sequence[int], logits: np.ndarray) -> np.ndarray:
        ids = with_output(self._prefix, output)
        scores = self._processors(ids, torch.from_numpy(logits)[None])
        return scores[0].to(torch.float32).contiguous().numpy()


class RowCriterion:
    """A :data:`StopCriterion` of the engine that asks stopping criteria of transformers."""

    def __init__(self, prefix: Tensor, criteria: Sequence[Any], recorder: Recorder | None = None) -> None:
        self._prefix = prefix
        self._criteria = list(criteria)
        self._recorder = recorder

    def __call__(self, prompt: Sequence[int], output: Sequence[int]) -> bool:
        ids = with_output(self._prefix, output)
        scores = None if self._recorder is None else tuple(self._recorder.steps(len(output)))
        # each is asked, as in transformers, even when an earlier one has said yes
        said = [torch.as_tensor(criterion(ids, scores), device="cpu") for criterion in self._criteria]
        return any(bool(answer.any()) for answer in said)


class Recorder:
    """Keeps the logits that pass by, one float32 [1, V] per step; a step that is run again replaces its entry."""

    def __init__(self) -> None:
        self._seen: dict[int, Tensor] = {}

    def __call__(self, prompt: Sequence[int], output: Sequence[int], logits: np.ndarray) -> np.ndarray:
        self._seen[len(output)] = torch.from_numpy(logits.copy())[None]
        return logits

    def steps(self, count: int) -> list[Tensor]:
        return [self._seen[step] for step in range(count)]


def with_output(prefix: Tensor, output: Sequence[int]) -> Tensor:
    """int64 [1, L + n]."""
    return torch.cat([prefix, torch.tensor(output, dtype=torch.long, device="cpu")])[None]
