"""A text-generation pipeline that hands all of its inputs to the engine, instead of one batch after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from transformers import TextGenerationPipeline

from paged_backend.adapters.huggingface.model import PagedGeneration
from paged_backend.adapters.huggingface.state import SUBMIT, Pending, Submitted


class PagedTextGenerationPipeline(TextGenerationPipeline):
    """transformers' ``TextGenerationPipeline`` over a paged model: same call, same results, one continuous batch.

    A list comes back as a list; a dataset or a generator is read ahead of by ``max_in_flight`` inputs, and its
    results come in order while later inputs run. No padding is needed, so ``batch_size`` and ``num_workers`` have
    nothing to decide; every input gives what it would give alone.
    """

    max_in_flight = 512

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.model, PagedGeneration):
            raise TypeError(
                "PagedTextGenerationPipeline needs a paged model: PagedModelForCausalLM.from_pretrained(...) or "
                "accelerate(model)"
            )

    def get_iterator(
        self,
        inputs: Iterable[Any],
        num_workers: int,
        batch_size: int,
        preprocess_params: Mapping[str, Any],
        forward_params: Mapping[str, Any],
        postprocess_params: Mapping[str, Any],
    ) -> Iterator[Any]:
        """Results of ``inputs`` in their order. With a streamer they run one after another, as its protocol asks."""
        ahead = self.max_in_flight if forward_params.get("streamer") is None else 1
        running: deque[tuple[dict[str, Any], Pending]] = deque()
        try:
            for item in inputs:
                if len(running) >= ahead:
                    yield self._finish(*running.popleft(), forward_params, postprocess_params)
                model_inputs = self.preprocess(item, **preprocess_params)
                running.append((model_inputs, self._start(model_inputs, forward_params)))
            while running:
                yield self._finish(*running.popleft(), forward_params, postprocess_params)
        finally:
            for _, pending in running:
                pending.cancel()

    def _start(self, model_inputs: Mapping[str, Any], forward_params: Mapping[str, Any]) -> Pending:
        """Run ``_forward`` up to its call of ``generate``, which goes to the engine."""
        try:
            self.forward(dict(model_inputs), **forward_params, paged_call=SUBMIT)
        except Submitted as call:
            return call.pending
        raise RuntimeError("this version of transformers' pipeline does not call model.generate")

    def _finish(
        self,
        model_inputs: Mapping[str, Any],
        pending: Pending,
        forward_params: Mapping[str, Any],
        postprocess_params: Mapping[str, Any],
    ) -> Any:
        """Run ``_forward`` again with what ``generate`` has found meanwhile, then ``postprocess``."""
        model_outputs = self.forward(dict(model_inputs), **forward_params, paged_call=pending)
        return self.postprocess(model_outputs, **postprocess_params)
