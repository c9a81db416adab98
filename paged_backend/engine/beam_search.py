"""BeamGroup: the beams of one request, which advance together. Pure bookkeeping over log-probabilities.

Each step every beam proposes its likeliest continuations. Once all have, the best of them become the next
beams (their requests share KV by copy-on-write, see ``EngineCore``), those that end join the finished
hypotheses, and the search stops when these cannot be beaten any more. Definitions, float32 arithmetic
included, are those of transformers' ``generate``, so that the hypotheses agree with it token for token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paged_backend.outputs import Hypothesis
from paged_backend.sampling_params import BeamSearch

OUT = np.float32(-1e9)
"""Added to the score of whatever must not be chosen; swallows the score, so what is out is equal."""

Proposal = Sequence[tuple[int, float, int]]
"""(token id, log-probability, rank) of a beam's likeliest continuations, best first."""


@dataclass(frozen=True, slots=True)
class Pick:
    """A beam of the next step: beam ``parent`` of this one continued by ``token_id``."""

    parent: int
    token_id: int


@dataclass(frozen=True, slots=True)
class _Beam:
    """One token that goes on from another beam, so that a step costs the same however long the outputs are.

    parent: the number of the beam that it continues, among those of its step.
    """

    score: np.float32
    before: _Beam | None = None
    token_id: int = -1
    parent: int = -1
    length: int = 0

    def path(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(token ids, parents) from the first one on."""
        path: list[tuple[int, int]] = []
        beam = self
        while beam.before is not None:
            path.append((beam.token_id, beam.parent))
            beam = beam.before
        return tuple(t for t, _ in reversed(path)), tuple(p for _, p in reversed(path))


class BeamGroup:
    """options, max_tokens, stop_ids, and stops (output ids -> whether they end a hypothesis) of one request.

    stops: None if nothing but ids and length ends one.
    """

    def __init__(
        self,
        options: BeamSearch,
        max_tokens: int,
        stop_ids: Sequence[int],
        stops: Callable[[Sequence[int]], bool] | None = None,
    ) -> None:
        self.options = options
        self.max_tokens = max_tokens
        self.stop_ids = frozenset(stop_ids)
        # enough to leave num_beams of them running when each beam's likeliest continuation ends it
        self.num_candidates = max(2, 1 + len(self.stop_ids)) * options.num_beams
        self.done = False
        self._stops = stops
        self._beams = [_Beam(np.float32(0))]
        self._proposals: dict[int, Proposal] = {}
        self._hopeless = False  # no running beam can beat the finished hypotheses
        empty = Hypothesis((), float(OUT), (), finished=False)
        self._hypotheses = [empty] * options.num_beams

    @property
    def num_beams(self) -> int:
        """Beams that propose in this step: one at first, then ``options.num_beams``."""
        return len(self._beams)

    def propose(self, beam: int, proposal: Proposal) -> bool:
        """Take one beam's proposal; True if it was the last one missing. Making it again changes nothing."""
        if beam in self._proposals:
            return False
        self._proposals[beam] = proposal
        return len(self._proposals) == len(self._beams)

    def advance(self) -> list[Pick]:
        """End the step: the beams of the next one, best first, or none and ``done``."""
        candidates = self._candidates()
        ends = [self._ends(beam) for beam in candidates]
        self._proposals.clear()
        width, options = self.options.num_beams, self.options
        running = [
            (beam.score + (OUT if end else np.float32(0)), beam) for beam, end in zip(candidates, ends)
        ]
        running = sorted(running, key=lambda item: -item[0])[:width]
        self._finish(candidates, ends)
        length = candidates[0].length
        self._beams = [replace(beam, score=score) for score, beam in running]
        patient = options.early_stopping == "never" and options.length_penalty > 0
        reach = self.max_tokens if patient else length
        best = running[0][0] / np.float32(reach**options.length_penalty)
        worst = min(np.float32(h.score) for h in self._hypotheses)
        if not any(best > (worst if h.finished else OUT) for h in self._hypotheses):
            self._hopeless = True
        full = options.early_stopping is True and all(h.finished for h in self._hypotheses)
        self.done = self._hopeless or full or all(ends)
        return [] if self.done else [Pick(beam.parent, beam.token_id) for beam in self._beams]

    def best(self, count: int) -> list[Hypothesis]:
        """The ``count`` best hypotheses, best first. Valid when done."""
        return self._hypotheses[:count]

    def _candidates(self) -> list[_Beam]:
        scored = [
            (beam.score + np.float32(logprob), index, token)
            for index, beam in enumerate(self._beams)
            for token, logprob, _ in self._proposals[index]
        ]
        scored.sort(key=lambda item: -item[0])
        beams = self._beams
        return [
            _Beam(score, beams[i], token, i, beams[i].length + 1)
            for score, i, token in scored[: self.num_candidates]
        ]

    def _ends(self, beam: _Beam) -> bool:
        if beam.token_id in self.stop_ids or beam.length >= self.max_tokens:
            return True
        return self._stops is not None and self._stops(beam.path()[0])

    def _finish(self, candidates: Sequence[_Beam], ends: Sequence[bool]) -> None:
        """Let the candidates that end, if they are among the best num_beams, compete with the hypotheses so far."""
        width = self.options.num_beams
        full = self.options.early_stopping is True and all(h.finished for h in self._hypotheses)
        if full or self._hopeless:
            return
        penalty = np.float32(candidates[0].length ** self.options.length_penalty)
        fresh = [
            Hypothesis(tokens, float(beam.score / penalty), parents)
            for beam, end in zip(candidates[:width], ends)
            if end
            for tokens, parents in (beam.path(),)
        ]
        self._hypotheses = sorted([*self._hypotheses, *fresh], key=lambda h: -h.score)[:width]
