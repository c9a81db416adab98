"""Products of interpreted kernels, of which no row depends on the others, as on a GPU.

Triton's interpreter multiplies a tile by numpy, and in some of its kernels the bits of a row depend on its place in the
tile; the matrix instructions of a GPU compute every row alike. Only tests interpret kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paged_backend.kernels.row_products import from_lanes, to_lanes


def use_row_products() -> None:
    """Replace the product of the interpreter in this process, once."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original = InterpreterBuilder.create_dot
    if getattr(original, "by_rows", False):
        return

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if a.data.dtype != np.float32 or b.data.dtype != np.float32 or d.data.dtype != np.float32:
            return original(self, a, b, d, *options)
        rows = from_lanes(np.ascontiguousarray(b.data.T) @ to_lanes(a.data), len(a.data))
        return TensorHandle(rows + d.data, d.dtype.scalar)

    create_dot.by_rows = True  # type: ignore[attr-defined]
    InterpreterBuilder.create_dot = create_dot
