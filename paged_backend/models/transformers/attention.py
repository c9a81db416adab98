"""Our attention and mask functions in transformers' registries, and what a mask function of theirs means."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

NAME = "paged_backend"
"""Under which both are registered."""


def is_causal_window(rule: Any, window: int | None) -> bool:
    """Whether a mask function of transformers is the causal mask, limited to ``window`` tokens if one is given."""
    reach = window or 1000
    zero = torch.tensor(0, device="cpu")
    queries = torch.tensor(
        [0, 1, reach - 1, reach, reach + 1, 2 * reach, 2 * reach + 1, 5 * reach + 3], device="cpu"
    )
    try:
        for query in queries:
            for back in (-1, 0, 1, reach - 1, reach, reach + 1, 2 * reach):
                key = query - back
                if key < 0:
                    continue
                seen = bool(rule(zero, zero, query, key))
                if seen != (back >= 0 and (window is None or back < window)):
                    return False
    except (IndexError, RuntimeError, TypeError, AttributeError):  # it looks positions up in some table
        return False
    return True


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer; the module knows the model whose pages it writes to."""
    return module._paged_model.attend(  # type: ignore[operator, union-attr]
        module, query, key, value, attention_mask, scaling, softcap, s_aux, options
    ), None


def _mask(*, mask_function: Any, local_size: int | None = None, **options: Any) -> Tensor:
    """No mask is needed; a stand-in carries the rule that a real one would follow to the attention function."""
    stand_in = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device="cpu")
    stand_in.paged_rule = (mask_function, local_size)  # type: ignore[attr-defined]
    return stand_in


def register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
