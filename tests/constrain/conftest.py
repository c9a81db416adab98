"""A small tokenizer and the battery of JSON schemas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paged_backend.testing import small_tokenizer

SCHEMAS = json.loads((Path(__file__).parent / "schemas.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def tokenizer():
    return small_tokenizer()


def pytest_generate_tests(metafunc):
    if "battery_schema" in metafunc.fixturenames:
        metafunc.parametrize("battery_schema", SCHEMAS.values(), ids=SCHEMAS)
