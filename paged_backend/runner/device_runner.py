"""DeviceRunner: a step on a GPU. One copy of arrays there, the model and the draw, one copy of token ids back.

The host waits once a step, for the token ids, and by then it has launched the next one: what a step draws stays on the
device too, and the next step's stand-ins (``base.drawn_by``) are replaced there. So are the ids of all tokens whose
keys and values the pool holds, for the penalties. Rows that ask for more than these, temperature, top-k, top-p and
min-p (grammars, masks, log-probabilities, beams) are drawn by the host's sampler from their logits, and so are prompt
log-probabilities: those rows are copied back, and no others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from paged_backend.batch import Batch
from paged_backend.errors import DeviceLostError
from paged_backend.kernels.triton.backend import SizedInputs, TritonKernels
from paged_backend.kernels.triton.penalties import Penalties
from paged_backend.runner.base import Result, Runner, ScheduledSequence
from paged_backend.runner.decode_graphs import Capture, CudaCapture, DecodeGraphs
from paged_backend.runner.device_memory import GrowingCache
from paged_backend.runner.device_rows import is_decode, penalty_columns, rows_of, sampled_of, sampling_columns
from paged_backend.runner.history import TokenHistory
from paged_backend.runner.model_runner import Model
from paged_backend.runner.sampler import (
    Sampled,
    Sampler,
    SampleRow,
    only_penalises,
    only_truncates,
    penalised,
)
from paged_backend.runner.staging import Staging
from paged_backend.sampling_params import SamplingParams

_COLUMNS = ("temperature", "top_k", "top_p", "min_p", "noise")
_PENALTIES = ("sequences", "prompt_lens", "repetition", "frequency", "presence")


class DeviceRunner(Runner):
    """The engine's runner for ``device="cuda"``; with interpreted kernels on the CPU the same steps, for tests.

    Owns the model's KV memory: up to ``num_blocks`` blocks of ``block_size`` tokens in every layer. max_num_seqs,
    max_model_len: what graphs are made for. capture: see ``decode_graphs``; None takes CUDA graphs on a GPU, unless the
    model cannot be captured (``graphs``). whole_contexts: tables name the blocks of all tokens of a sequence, none
    being given up to a sliding window; else penalties are the host's business.
    """

    runs_ahead = True

    def __init__(
        self,
        model: Model,
        kernels: TritonKernels,
        num_blocks: int,
        block_size: int,
        kv_dtype: str,
        max_num_seqs: int,
        max_model_len: int,
        capture: Capture | None = None,
        graphs: bool = True,
        whole_contexts: bool = True,
    ) -> None:
        spec = model.spec
        self.model, self.kernels, self.block_size = model, kernels, block_size
        self.vocab_size = spec.vocab_size
        self.memory = GrowingCache(kernels, spec, num_blocks, block_size, kv_dtype)
        self.sampler = Sampler()
        self._staging = Staging(kernels.torch_device)
        self._whole_contexts = whole_contexts
        self._ids = torch.zeros(
            num_blocks, block_size, dtype=torch.int64, device=kernels.torch_device
        )  # by slot
        self._drawn = torch.zeros(max_num_seqs, dtype=torch.int64, device=kernels.torch_device)
        if capture is None and graphs and kernels.torch_device.type == "cuda":
            capture = CudaCapture()
        self._logits: Tensor | None = (
            None  # of the last decode step that was asked for them, [max_num_seqs, V]
        )
        self._graphs: DecodeGraphs | None = None
        if capture is not None:
            self._graphs = DecodeGraphs(
                {
                    "draw": self._decode,
                    "penalise": self._decode_penalised,
                    "with logits": self._decode_with_logits,
                },
                self._staging,
                self._resolve,
                capture,
                max_num_seqs,
                max_model_len,
                block_size,
            )

    def warm_up(self, tokens: int = 64) -> None:
        """Compile the kernels and capture the smallest graph, so that no request waits for that.

        A prompt of ``tokens`` tokens, then one token after it, all in the null block, where nobody looks.
        """
        row = SampleRow(SamplingParams(temperature=0).resolved(), TokenHistory([], 0), 0, seed=0)
        blocks = np.zeros(-(-(tokens + 1) // self.block_size), np.int32)
        self.run([ScheduledSequence([0] * tokens, 0, blocks, [tokens - 1], [row])])
        self.run([ScheduledSequence([0], tokens, blocks, [0], [row])])

    def draws_alone(self, row: SampleRow) -> bool:
        return only_penalises(row) and (self._whole_contexts or not penalised(row))

    def run(self, scheduled: Sequence[ScheduledSequence]) -> list[Result]:
        return self.launch(scheduled)()

    def launch(self, scheduled: Sequence[ScheduledSequence]) -> Callable[[], list[Result]]:
        with self._losses_told():
            results = self._launch(scheduled)

        def wait() -> list[Result]:
            with self._losses_told():
                return results()

        return wait

    @torch.inference_mode()
    def _launch(self, scheduled: Sequence[ScheduledSequence]) -> Callable[[], list[Result]]:
        batch = Batch.build(scheduled, self.block_size)
        lens = batch.attention.seq_lens
        arrays = {
            "input_ids": batch.input_ids,
            "positions": batch.positions,
            "slot_mapping": batch.attention.slot_mapping,
            "query_start_loc": batch.attention.query_start_loc,
            "seq_lens": lens,
            "block_table": batch.attention.block_table,
        }
        rows, picks = rows_of(scheduled)
        arrays |= sampling_columns(rows)
        variant, others = "draw", list[int]()
        if not all(map(self.draws_alone, rows)):
            variant, others = "with logits", [i for i, row in enumerate(rows) if not only_truncates(row)]
        elif any(map(penalised, rows)):
            variant = "penalise"
            arrays |= penalty_columns(scheduled)
        longest = int(lens.max())
        self._make_room(int(arrays["block_table"].max()) + 1)
        logits: Tensor | None = None
        if self._graphs is not None and is_decode(scheduled):
            if others and self._logits is None:
                shape = (len(self._drawn), self.vocab_size)
                self._logits = torch.empty(shape, dtype=torch.float32, device=self.kernels.torch_device)
            (tokens,) = self._graphs.run(variant, arrays, longest)
            tokens, source, picked = tokens[: len(rows)], self._logits, others
        else:
            arrays["logit_rows"] = batch.logit_rows
            arrays["picks"] = np.array(picks, np.int64)
            tensors = self._staging.send(arrays)
            if int(arrays["input_ids"].min()) < 0:
                self._resolve(tensors)
            counts = tuple({len(sequence.token_ids) for sequence in scheduled})
            logits = self._forward(tensors, tensors["logit_rows"], counts, longest)
            whole = picks == list(range(logits.shape[0]))
            drawn_from = logits if whole else logits[tensors["picks"]]
            if variant == "penalise":
                self._penalise(drawn_from, tensors, longest)
            tokens = self._draw(drawn_from, tensors)
            source, picked = logits, [picks[i] for i in others]
        drawn = self._keep(tokens)
        left: Tensor | None = None
        if others and source is not None:
            left = source[self._staging.send({"picked": np.array(picked, np.int64)})["picked"]]

        @torch.inference_mode()
        def results() -> list[Result]:
            sampled = sampled_of(drawn())
            if left is not None:
                for i, other in zip(
                    others, self.sampler.sample(self.kernels.to_host(left.float()), [rows[i] for i in others])
                ):
                    sampled[i] = other
            return self._results(scheduled, logits, sampled)

        return results

    def _keep(self, tokens: Tensor) -> Callable[[], list[int]]:
        """Leave drawn ids [R] where the next step finds them, and send them to the host; returns what waits there."""
        self._drawn[: len(tokens)].copy_(tokens)
        if tokens.device.type == "cpu":
            ids = tokens.tolist()
            return lambda: ids
        host = torch.empty(len(tokens), dtype=tokens.dtype, device="cpu", pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

        def wait() -> list[int]:
            arrived.synchronize()
            return host.tolist()

        return wait

    def _resolve(self, tensors: dict[str, Tensor]) -> None:
        """Put what the step before has drawn in the places of its stand-ins (0 for a row that was not finite)."""
        ids = tensors["input_ids"]
        drawn = self._drawn[(-1 - ids).clamp_(min=0)].clamp_(min=0)
        ids.copy_(torch.where(ids < 0, drawn, ids))

    def _results(
        self,
        scheduled: Sequence[ScheduledSequence],
        logits: Tensor | None,
        sampled: Sequence[Sampled | Exception],
    ) -> list[Result]:
        drawn = iter(sampled)
        results: list[Result] = []
        first = 0
        for sequence in scheduled:
            count = len(sequence.scored_ids)
            scores: list[Sampled] = []
            if count and logits is not None:
                scored = self.kernels.to_host(logits[first : first + count].float())
                scores = self.sampler.prompt_logprobs(scored, sequence.scored_ids, sequence.num_top)
            first += len(sequence.logit_rows)
            results.append(Result([next(drawn) for _ in sequence.rows], scores))
        return results

    def _forward(
        self, tensors: dict[str, Tensor], logit_rows: Tensor, counts: tuple[int, ...], longest: int
    ) -> Tensor:
        attention = SizedInputs(
            tensors["query_start_loc"],
            tensors["seq_lens"],
            tensors["block_table"],
            tensors["slot_mapping"],
            query_counts=counts,
            longest=longest,
        )
        self._ids.view(-1)[tensors["slot_mapping"]] = tensors["input_ids"]
        return self.model.forward(
            tensors["input_ids"], tensors["positions"], attention, logit_rows, self.memory.caches
        )

    def _draw(self, logits: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        return self.kernels.sample(logits, *(tensors[name] for name in _COLUMNS))

    def _decode(self, tensors: dict[str, Tensor], longest: int) -> tuple[Tensor]:
        """What a graph does: one token of each row, its logits, its draw."""
        rows = torch.arange(len(tensors["seq_lens"]), device=self.kernels.torch_device)
        return (self._draw(self._forward(tensors, rows, (1,), longest), tensors),)

    def _decode_penalised(self, tensors: dict[str, Tensor], longest: int) -> tuple[Tensor]:
        """The same, with penalties."""
        rows = torch.arange(len(tensors["seq_lens"]), device=self.kernels.torch_device)
        logits = self._forward(tensors, rows, (1,), longest)
        self._penalise(logits, tensors, longest)
        return (self._draw(logits, tensors),)

    def _penalise(self, logits: Tensor, tensors: dict[str, Tensor], longest: int) -> None:
        columns = {name: tensors[name] for name in ("block_table", "seq_lens", *_PENALTIES)}
        self.kernels.penalise(logits, self._ids, Penalties(longest=longest, **columns))

    def _decode_with_logits(self, tensors: dict[str, Tensor], longest: int) -> tuple[Tensor]:
        """The same, leaving the logits where the host finds those of the rows that it draws itself."""
        rows = torch.arange(len(tensors["seq_lens"]), device=self.kernels.torch_device)
        logits = self._forward(tensors, rows, (1,), longest)
        if self._logits is not None:
            self._logits[: len(rows)].copy_(logits)
        return (self._draw(logits, tensors),)

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._make_room(max(destination for _, destination in pairs) + 1)
        self.kernels.copy_blocks(self.memory.caches, pairs)
        sent = self._staging.send({"pairs": np.array(pairs, np.int64)})["pairs"]
        self._ids[sent[:, 1]] = self._ids[sent[:, 0]]

    def give_back(self, blocks: Sequence[int]) -> bool:
        """A device's pool keeps what it has grown to until the engine closes."""
        return False

    def close(self) -> None:
        """Give the memory back now: graphs and runner hold each other, which a collection would find much later."""
        self._graphs = self._logits = None
        self.memory.caches.clear()
        del self.model
        if self.kernels.torch_device.type == "cuda":
            torch.cuda.empty_cache()

    def _make_room(self, blocks: int) -> None:
        if blocks <= self.memory.held:
            return
        if self._graphs is not None:
            if self.kernels.torch_device.type == "cuda":
                torch.cuda.synchronize(self.kernels.torch_device)  # one of them may be running
            self._graphs.clear()  # they hold the addresses of tensors of which the first may move before the last fails
        self.memory.ensure(blocks)

    @contextlib.contextmanager
    def _losses_told(self) -> Iterator[None]:
        """After an error, ask the device whether it still answers: some errors end a process' use of it for good."""
        try:
            yield
        except Exception as error:
            if self.kernels.torch_device.type == "cuda":
                try:
                    torch.cuda.synchronize(self.kernels.torch_device)
                except Exception as gone:
                    raise DeviceLostError(
                        f"the GPU does not answer any more ({gone}), after: {error}; start a new process"
                    ) from error
            raise
