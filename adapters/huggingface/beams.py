"""A call of ``generate`` that asks for a beam search."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput

from paged_backend.adapters.huggingface.call import EngineCall, Row
from paged_backend.adapters.huggingface.processors import RowProcessor
from paged_backend.outputs import CompletionOutput
from paged_backend.sampling_params import BeamSearch, SamplingParams


class BeamCall(EngineCall):
    """The same for ``_beam_search``: one request per prompt, its beams forked inside the engine."""

    beams = True

    def why_not(self) -> str | None:
        config = self.config
        if config.do_sample:
            return "beams that are sampled follow transformers' random numbers"
        if config.return_dict_in_generate and (config.output_logits or config.output_scores):
            return "beam search here does not record scores or logits of each step"
        if config.low_memory:
            return "low_memory is set"
        if max(2, 1 + len(self.eos_ids)) * config.num_beams > self.engine.vocab_size:
            return "the vocabulary is too small for that many beams"
        return super().why_not()

    def _rows(self, index: int) -> list[Row]:
        config, prefix = self.config, self.input_ids[index]
        processors = self.processors.for_row(index, self.copies)
        params = SamplingParams(
            n=config.num_return_sequences or 1,
            temperature=0.0,
            repetition_penalty=1.0,
            beam_search=BeamSearch(config.num_beams, config.length_penalty, config.early_stopping),
            logits_processors=[RowProcessor(prefix, processors)] if processors else [],
            **self._limits(prefix, None),
        )
        return [Row(prefix, self._prompt(index), params)]

    def _assemble(self, outputs: list[CompletionOutput]) -> Any:
        width = max(len(output.token_ids) for output in outputs)
        per_prompt = len(outputs) // len(self.rows)
        # as in transformers, a pad_token_id of 0 counts as none here
        pad = self.config._pad_token_tensor
        fill = (int(pad) if pad is not None and int(pad) else self.eos_ids[0]) if self.eos_ids else -1
        new = torch.full((len(outputs), width), fill, dtype=torch.long, device="cpu")
        indices = torch.full((len(outputs), width), -1, dtype=torch.int32, device="cpu")
        for i, output in enumerate(outputs):
            new[i, : len(output.token_ids)] = torch.tensor(output.token_ids, dtype=torch.long, device="cpu")
            if output.beam is not None:
                first = i // per_prompt * self.config.num_beams
                indices[i, : len(output.token_ids)] = (
                    torch.tensor(output.beam.parents, dtype=torch.long, device="cpu") + first
                )
        prompts = torch.stack([row.prefix for row in self.rows]).repeat_interleave(per_prompt, dim=0)
        sequences = torch.cat([prompts, new], dim=1)
        if not self.config.return_dict_in_generate:
            return sequences
        return GenerateBeamDecoderOnlyOutput(sequences=sequences, beam_indices=indices)
