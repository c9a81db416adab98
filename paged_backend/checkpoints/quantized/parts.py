"""What a file has of one module, and what a reader makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from paged_backend.errors import ModelLoadError
from paged_backend.kernels.array import Array
from paged_backend.kernels.quantized import QuantizedWeight


class Stored(NamedTuple):
    """A tensor of a file. dtype: as the file calls it. read: reads it, as a rule as a view of the mapped file."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Array]


class Found(NamedTuple):
    """A weight that a module's tensors make up. used: names, within the module, of the tensors that it needs."""

    shape: tuple[int, int]
    read: Callable[[], QuantizedWeight]
    used: tuple[str, ...]


@dataclass(frozen=True)
class Parts:
    """Tensors of one module by their names within it (``qweight``, ``weight.absmax``). source: for messages."""

    module: str
    source: str
    tensors: Mapping[str, Stored]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def dtype(self, name: str) -> str | None:
        """As the file calls it; None if there is no such tensor."""
        return self.tensors[name].dtype if name in self.tensors else None

    def array(self, name: str, *dtypes: str) -> Array:
        """A tensor that the format needs, in one of ``dtypes`` (any without). Raises ModelLoadError."""
        return self.stored(name, *dtypes).read()

    def stored(self, name: str, *dtypes: str) -> Stored:
        """The entry of :meth:`array`."""
        if name not in self.tensors:
            raise ModelLoadError(f"{self.source}: {self.module} has {', '.join(self.tensors)}, but no {name}")
        entry = self.tensors[name]
        if dtypes and entry.dtype not in dtypes:
            raise ModelLoadError(
                f"{self.source}: {self.module}.{name} has dtype {entry.dtype}, expected {' or '.join(dtypes)}"
            )
        return entry

    def matrix(self, name: str, *dtypes: str) -> tuple[int, int]:
        """Shape of a tensor of two dimensions. Raises ModelLoadError."""
        shape = self.stored(name, *dtypes).shape
        if len(shape) != 2:
            raise ModelLoadError(f"{self.source}: {self.module}.{name} has shape {shape}, expected a matrix")
        return shape[0], shape[1]

    @property
    def title(self) -> str:
        return f"{self.source}: {self.module}.weight"
