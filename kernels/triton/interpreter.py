"""Importing this before Triton makes its kernels run in Python, on CPU tensors, one program after another.

The tests load it as a pytest plugin, so that it comes before any library that imports Triton. Triton reads the
variable when it is imported and when a kernel is defined; later is too late, and a value that is set already is
kept.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
