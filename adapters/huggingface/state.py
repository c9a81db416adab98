"""What a paged model holds beside its module, and what stands for a call that is still running."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from paged_backend.engine.engine import Engine


@dataclass
class Paged:
    """What a paged model has beside its module.

    load: the module for a config, its weights read; None once they are. rebuild: an engine for the module as
    it is now. seen: :func:`fingerprint` of the weights that the engine has, None while the module has none. drafts:
    whether it was told that the model drafts for another one.
    """

    engine: Engine
    base: type
    load: Callable[[Any], Any] | None
    rebuild: Callable[[Any], Engine]
    seen: Fingerprint | None = None
    drafts: bool = False
    lock: Any = field(default_factory=threading.RLock)


@dataclass(frozen=True)
class Fingerprint:
    """structure: names and types of all modules. values: identity, version and a few numbers of each parameter."""

    structure: tuple[Any, ...]
    values: tuple[Any, ...]


def fingerprint(module: torch.nn.Module) -> Fingerprint:
    """Cheap (milliseconds) and enough to notice training, loading, merging and injected adapters."""
    structure = tuple((name, type(part)) for name, part in module.named_modules() if name)
    values = []
    for name, parameter in module.named_parameters():
        data = parameter.detach()
        version = 0 if parameter.is_inference() else parameter._version
        few = data.flatten()[:: max(1, data.numel() // 8)] if data.is_contiguous() else data.reshape(-1)[:8]
        sample = few.clone().view(torch.uint8).cpu().numpy().tobytes()
        values.append((name, data.data_ptr(), version, data.dtype, str(data.device), sample))
    return Fingerprint(structure, tuple(values))


class Pending:
    """A call that has been handed to the engine.

    result: waits for what ``generate`` returns. cancel: takes the call's requests out of the engine.
    """

    def __init__(self, result: Callable[[], Any], cancel: Callable[[], None] = lambda: None) -> None:
        self.result = result
        self.cancel = cancel


SUBMIT = "submit"


class Submitted(Exception):
    """Raised by ``generate(paged_call=SUBMIT)`` to leave its caller, here transformers' pipeline, until the end."""

    def __init__(self, pending: Pending) -> None:
        super().__init__("the call was handed to the engine")
        self.pending = pending
