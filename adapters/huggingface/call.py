"""One call of ``generate`` on the engine: may it run there, what are its requests, what does their result look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import stopping_criteria as sc
from transformers.generation.utils import GenerateDecoderOnlyOutput

from paged_backend.adapters.huggingface.processors import (
    ROW_CRITERIA,
    PreparedProcessors,
    Recorder,
    RowCriterion,
    RowProcessor,
    split_penalty,
    split_warpers,
)
from paged_backend.engine.engine import Engine
from paged_backend.engine.stream import RequestHandle
from paged_backend.outputs import CompletionOutput
from paged_backend.sampling_params import RequestOutputKind, SamplingParams

_NO_INPUTS = frozenset(
    ("attention_mask", "position_ids", "logits_to_keep", "use_cache", "tokenizer", "cache")
)
"""Arguments of the model's forward that are understood or that change no result; a cache is looked at by itself."""


@dataclass(slots=True)
class Row:
    """One request. prefix: int64 [L], its row as transformers holds it."""

    prefix: Tensor
    prompt: list[int]
    params: SamplingParams
    logits: Recorder | None = None
    scores: Recorder | None = None


class EngineCall:
    """What transformers prepared for its decoding loop (``_sample`` or ``_beam_search``), to be run by ``engine``.

    input_ids: int64 [B * copies, L], each prompt ``copies`` times in a row. model_kwargs: for the model's forward.
    """

    beams = False

    def __init__(
        self,
        engine: Engine,
        input_ids: Tensor,
        processors: Any,
        criteria: Sequence[Any],
        config: Any,
        model_kwargs: dict[str, Any],
        streamer: Any = None,
    ) -> None:
        self.engine = engine
        self.input_ids = input_ids
        self.processors = processors
        self.criteria = list(criteria)
        self.config = config
        self.model_kwargs = model_kwargs
        self.streamer = streamer
        self.copies = config.num_beams if self.beams else (config.num_return_sequences or 1)
        self.mask = model_kwargs.get("attention_mask")
        eos = config._eos_token_tensor
        self.eos_ids = [] if eos is None else eos.tolist()
        lengths = [c.max_length for c in self.criteria if isinstance(c, sc.MaxLengthCriteria)]
        self.max_tokens = min(lengths) - input_ids.shape[1] if lengths else 0
        self.handles: list[RequestHandle] = []
        self.rows: list[Row] = []

    # --- may it run here -----------------------------------------------------------------------------------------

    def why_not(self) -> str | None:
        """Why only transformers can run this call; None if the engine can."""
        config, kwargs = self.config, self.model_kwargs
        if not isinstance(self.processors, PreparedProcessors):
            return "its logits processors were not prepared by this model"
        if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
            return "output_attentions and output_hidden_states need transformers' own forward"
        cache = kwargs.get("cache")
        if cache is not None:
            return "a cache was passed in"
        for name, value in kwargs.items():
            if name not in _NO_INPUTS and value is not None and value is not False:
                return f"it passes {name} to the model"
        if config.cache_implementation == "quantized":
            return "cache_implementation='quantized' changes the results"
        if self.input_ids.dim() != 2 or self.input_ids.shape[1] == 0 or self.input_ids.device.type != "cpu":
            return "its input is not a batch of token ids on the CPU"
        if self.max_tokens < 1:
            return "it has no maximum length"
        return self._masked_oddly() or self._needs_batch()

    def _masked_oddly(self) -> str | None:
        if self.mask is None:
            expected = torch.arange(self.input_ids.shape[1], device="cpu").expand_as(self.input_ids)
            seen = torch.ones_like(self.input_ids, dtype=torch.bool)
        else:
            if self.mask.shape != self.input_ids.shape:
                return "its attention mask has another shape than its input"
            seen = self.mask != 0
            if not bool(seen[:, -1].all()):
                return "its attention mask hides the last token of a prompt (right padding)"
            expected = seen.long().cumsum(-1) - 1
        positions = self.model_kwargs.get("position_ids")
        own = positions is not None and (
            positions.shape[-1] != seen.shape[-1]
            or not bool((positions == expected).masked_fill(~seen, True).all())
        )
        if own:
            return "it passes position_ids of its own"
        return None

    def _needs_batch(self) -> str | None:
        rows = len(self.input_ids)
        custom = [*self.processors.custom, *(c for c in self.criteria if type(c) not in ROW_CRITERIA)]
        if custom and rows > 1:
            return f"{type(custom[0]).__name__} wants to see the whole batch at once"
        if any(type(c).__name__.startswith(("UnbatchedClassifier", "SynthID")) for c in custom):
            return f"{type(custom[0]).__name__} runs the model itself or remembers earlier steps"
        if self.streamer is not None and rows > 1:
            return "its streamer gets the tokens of several rows at once"
        ends_early = any(
            not isinstance(c, (sc.MaxLengthCriteria, sc.EosTokenCriteria)) for c in self.criteria
        )
        if rows > 1 and ends_early and not self.eos_ids and not self.beams:
            return "rows may end at different lengths, and without an eos_token_id nothing fills the shorter ones"
        return None

    # --- requests ------------------------------------------------------------------------------------------------

    def submit(self) -> None:
        """Queue every row. Raises :class:`RequestRejectedError` for one that the engine cannot hold; none runs then."""
        self.rows = [row for index in range(0, len(self.input_ids), self.copies) for row in self._rows(index)]
        self.handles = self.engine.submit_many([r.prompt for r in self.rows], [r.params for r in self.rows])

    def _rows(self, index: int) -> list[Row]:
        """Requests for the ``copies`` rows from ``index`` on: one with n samples if they need nothing of their own."""
        processors, fields = self._split(index)
        fits = self.copies <= self.engine.max_num_seqs
        if self.copies == 1 or (fits and not (processors or self._watched or self._records)):
            return [self._row(index, processors, fields, self.copies)]
        return [self._row(i, *self._split(i), 1) for i in range(index, index + self.copies)]

    def _split(self, index: int) -> tuple[list[Any], dict[str, Any]]:
        """(processors to run as they are, those the engine has itself as fields of ``SamplingParams``)."""
        processors = self.processors.for_row(index, self.copies)
        if self._records:
            return processors, {}  # what is recorded is what has gone through all of them
        rest, fields = split_warpers(processors)
        if not self._has_holes(index):
            rest, penalty = split_penalty(rest, self.input_ids.shape[1] - len(self._prompt(index)))
            fields.update(penalty)
        return rest, fields

    @property
    def _records(self) -> bool:
        config = self.config
        return bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))

    @property
    def _watched(self) -> list[Any]:
        """Stopping criteria that must be asked after each token."""
        return [c for c in self.criteria if type(c) not in (sc.MaxLengthCriteria, sc.EosTokenCriteria)]

    def _has_holes(self, index: int) -> bool:
        if self.mask is None:
            return False
        row = self.mask[index]
        return bool((row[1:] < row[:-1]).any())

    def _prompt(self, index: int) -> list[int]:
        ids = self.input_ids[index]
        return ids.tolist() if self.mask is None else ids[self.mask[index] != 0].tolist()

    def _row(self, index: int, processors: list[Any], fields: dict[str, Any], n: int) -> Row:
        prefix = self.input_ids[index]
        logits = Recorder() if self._records and self.config.output_logits else None
        scores = Recorder() if self._records and self.config.output_scores else None
        steps = [logits, RowProcessor(prefix, processors) if processors else None, scores]
        sampling: dict[str, Any] = {"temperature": 1.0 if self.config.do_sample else 0.0}
        if self.config.do_sample:
            # from torch's generator, so that torch.manual_seed and set_seed make this reproducible too
            sampling["seed"] = int(torch.randint(0, 2**62, (1,), dtype=torch.long, device="cpu").item())
        sampling.update({"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}, **fields)
        params = SamplingParams(
            n=n,
            **sampling,
            **self._limits(prefix, scores),
            logits_processors=[step for step in steps if step is not None],
            output_kind=RequestOutputKind.CUMULATIVE if self.streamer is None else RequestOutputKind.DELTA,
        )
        return Row(prefix, self._prompt(index), params, logits, scores)

    def _limits(self, prefix: Tensor, scores: Recorder | None) -> dict[str, Any]:
        vocab = self.engine.vocab_size
        watched = self._watched
        return {
            "max_tokens": self.max_tokens,
            "ignore_eos": True,  # the ids of this call's generation config are given as stop ids instead
            "stop_token_ids": [i for i in self.eos_ids if 0 <= i < vocab] if self._stops_at_eos else [],
            "stop_criteria": [RowCriterion(prefix, watched, scores)] if watched else [],
            "detokenize": False,
        }

    @property
    def _stops_at_eos(self) -> bool:
        return any(isinstance(c, sc.EosTokenCriteria) for c in self.criteria)

    # --- results -------------------------------------------------------------------------------------------------

    def result(self) -> Any:
        """Wait for the end. What ``generate`` returns; None if the model's context cut a row short of its maximum."""
        try:
            if self.streamer is not None:
                self._stream()
            outputs = [output for handle in self.handles for output in handle.result().outputs]
        finally:
            self.cancel()
            if self.streamer is not None:
                self.streamer.end()
        cut = any(o.finish_reason == "length" and len(o.token_ids) < self.max_tokens for o in outputs)
        return None if cut and self.streamer is None else self._assemble(outputs)

    def cancel(self) -> None:
        """Take what still runs out of the engine."""
        for handle in self.handles:
            handle.abort()

    def _stream(self) -> None:
        for output in self.handles[0]:
            for token in output.outputs[0].token_ids:
                self.streamer.put(torch.tensor([token], dtype=torch.long, device="cpu"))

    def _assemble(self, outputs: list[CompletionOutput]) -> Any:
        width = max(len(output.token_ids) for output in outputs)
        pad = self.config._pad_token_tensor
        fill = int(pad) if pad is not None else 0
        new = torch.full((len(outputs), width), fill, dtype=torch.long, device="cpu")
        for row, output in zip(new, outputs):
            row[: len(output.token_ids)] = torch.tensor(output.token_ids, dtype=torch.long, device="cpu")
        sequences = torch.cat([self.input_ids, new], dim=1)
        if not self.config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=self._recorded([row.scores for row in self.rows], outputs, new),
            logits=self._recorded([row.logits for row in self.rows], outputs, new),
        )

    @staticmethod
    def _recorded(
        recorders: list[Recorder | None], outputs: list[CompletionOutput], new: Tensor
    ) -> tuple[Tensor, ...] | None:
        """One [B, V] tensor per step. A row past its end is certain of the padding that stands there."""
        if recorders[0] is None:
            return None
        rows = [r.steps(len(output.token_ids)) for r, output in zip(recorders, outputs) if r is not None]
        steps = []
        for step in range(new.shape[1]):
            values = []
            for i, row in enumerate(rows):
                if step < len(row):
                    values.append(row[step])
                else:
                    over = torch.full_like(row[0], -float("inf"))
                    over[0, new[i, step]] = 0.0
                    values.append(over)
            steps.append(torch.cat(values))
        return tuple(steps)
