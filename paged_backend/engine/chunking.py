"""How many tokens of a prompt one step takes, so that steps last about equally long wherever in a prompt they are.

A token's products cost the same everywhere, its attention costs more with every token before it: near the end of a
long prompt a full budget of tokens would make everybody else wait several times as long for their next token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paged_backend.models.spec import DecoderSpec

_TOLERANCE = 1.25  # a chunk may cost that much of the budget before it is cut: short prompts stay whole
_LEAST = 16  # tokens of a chunk, whatever they cost: every step gets on
_ATTENTION_PACE = 0.5  # attention's arithmetic runs at about this share of the products' speed


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """context_weight: cost of attending to one token, in units of what a token costs besides. 0 ignores attention."""

    context_weight: float = 0.0

    def chunk(self, pending: int, computed: int, budget: int) -> int:
        """Of ``pending`` tokens after ``computed`` ones, as many as ``budget`` tokens' worth allows; at least 1 if both
        are above 0."""
        count = min(pending, budget)
        if self.context_weight and count > _LEAST:
            # the largest m with m * (1 + weight * (computed + m / 2)) <= the budget and its tolerance
            first = 1.0 + self.context_weight * computed
            root = math.sqrt(first * first + 2.0 * self.context_weight * _TOLERANCE * budget)
            count = min(count, max(_LEAST, int((root - first) / self.context_weight)))
        return count

    def cost(self, count: int, computed: int) -> int:
        """What a chunk takes off the budget: its tokens, or more if attention to what is before them weighs more."""
        worth = count * (1.0 + self.context_weight * (computed + count / 2)) / _TOLERANCE
        return max(count, int(worth))


NO_CONTEXT_COST = ChunkCost()


def chunk_cost(spec: DecoderSpec) -> ChunkCost:
    """The costs of a model: multiplications of attention per token of context over those of the weights per token.

    Layers with a sliding window count as free: what they attend to is bounded. An MLP of unknown size (a module of
    transformers') counts as the usual eight times the square of the hidden size.
    """
    attended = 2 * spec.num_heads * spec.head_dim * sum(1 for window in spec.windows if window is None)
    heads = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    mlp = 3 * spec.intermediate_size or 8 * spec.hidden_size
    weights = spec.num_layers * spec.hidden_size * (heads + mlp)
    return ChunkCost(attended / (weights * _ATTENTION_PACE))
