"""Where a config says how its model is quantised: asked of every folder, while few need the readers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEYS = ("quantization_config", "compression_config")


def split_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """A config without what it says of quantisation, and that: None if it is not quantised."""
    text = config.get("text_config")
    places: list[Mapping[str, Any]] = [config, text] if isinstance(text, Mapping) else [config]
    settings = next((place[key] for place in places for key in _KEYS if place.get(key)), None)
    plain = [{key: value for key, value in place.items() if key not in _KEYS} for place in places]
    if len(plain) == 2:
        plain[0]["text_config"] = plain[1]
    return plain[0], settings
