"""Rotary position embeddings: frequencies of every rope type, and cos/sin of a flat batch.

Two types depend on the length of the sequence: longrope has one set of frequencies for short and one for
long sequences, dynamic NTK stretches its base as the sequence grows. transformers decides in each forward
call by the longest sequence of the batch, so the answer to a prompt depends on its neighbours, and keys
cached before the switch keep the old rotation. Here keys outlive a call and are shared between requests, so
the choice is made once per engine, by the longest sequence it may serve (``max_model_len``): a request's
numbers depend on neither chunking, cache hits nor neighbours. This equals transformers for each sequence on
the same side of the limit as ``max_model_len`` (for dynamic: always, as long as max_model_len stays within
the model's own context, which is the default). To serve only short sequences with a longrope model, lower
max_model_len to the original context.
"""

from __future__ import annotations

import math

import numpy as np

from paged_backend.kernels.array import Array
from paged_backend.kernels.base import DeviceArray, Kernels
from paged_backend.models.spec import RopeSpec

_CHUNK = 1024


def inverse_frequencies(spec: RopeSpec, max_model_len: int) -> tuple[Array, float]:
    """Frequencies float32 [R/2] and the multiplier of cos and sin, for sequences up to max_model_len."""
    exponents = np.arange(0, spec.dim, 2, dtype=np.float32) / np.float32(spec.dim)
    if spec.rope_type == "default":
        return 1 / _power(spec.theta, exponents), 1.0
    if spec.rope_type == "linear":
        return 1 / _power(spec.theta, exponents) / np.float32(spec.factor), 1.0
    if spec.rope_type == "dynamic":
        return 1 / _power(_stretched_base(spec, max_model_len), exponents), 1.0
    if spec.rope_type == "llama3":
        return _llama3(spec, 1 / _power(spec.theta, exponents)), 1.0
    if spec.rope_type == "yarn":
        return _yarn(spec, _power(spec.theta, exponents)), _yarn_attention_factor(spec)
    if spec.rope_type == "longrope":
        long = max_model_len > spec.original_max_position
        factors = np.array(spec.long_factor if long else spec.short_factor, np.float32)
        return 1 / (factors * _power(spec.theta, exponents)), _longrope_attention_factor(spec)
    raise ValueError(f"unknown rope type {spec.rope_type!r}")


def _power(base: float, exponents: Array) -> Array:
    """float32, each the nearest to the true value, whatever the machine."""
    return np.power(base, exponents, dtype=np.float64).astype(np.float32)


def _stretched_base(spec: RopeSpec, max_model_len: int) -> float:
    length = max(max_model_len, spec.max_position)
    stretch = spec.factor * length / spec.max_position - (spec.factor - 1)
    return spec.theta * stretch ** (spec.dim / (spec.dim - 2))


def _llama3(spec: RopeSpec, inv_freq: Array) -> Array:
    """Slow rotations are interpolated, fast ones kept, those between blended by how often they turn."""
    turns = spec.original_max_position * inv_freq / (2 * math.pi)
    keep = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    keep = keep.clip(0, 1)
    return inv_freq * keep + inv_freq / spec.factor * (1 - keep)


def _yarn(spec: RopeSpec, period: Array) -> Array:
    def dimension_of(turns: float) -> float:
        """The (fractional) dimension that turns this often within the original context."""
        return (
            spec.dim
            * math.log(spec.original_max_position / (turns * 2 * math.pi))
            / (2 * math.log(spec.theta))
        )

    low, high = dimension_of(spec.beta_fast), dimension_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    ramp = (np.arange(spec.dim // 2, dtype=np.float32) - low) / (high - low or 0.001)
    interpolate = ramp.clip(0, 1)
    return 1.0 / (spec.factor * period) * interpolate + 1.0 / period * (1 - interpolate)


def _yarn_attention_factor(spec: RopeSpec) -> float:
    if spec.attention_factor is not None:
        return spec.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if spec.factor <= 1 else 0.1 * weight * math.log(spec.factor) + 1.0

    if spec.mscale and spec.mscale_all_dim:
        return mscale(spec.mscale) / mscale(spec.mscale_all_dim)
    return mscale(1.0)


def _longrope_attention_factor(spec: RopeSpec) -> float:
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(spec.factor) / math.log(spec.original_max_position))


class RotaryEmbedding:
    """cos and sin by position, tabulated as far as positions have been asked for.

    Each is the float32 nearest to that of its angle, on every machine: libraries' own float32 functions differ from
    that, and from each other, in some last bits.
    """

    def __init__(self, spec: RopeSpec, max_model_len: int) -> None:
        self.inv_freq, self.attention_factor = inverse_frequencies(spec, max_model_len)
        self._cos: DeviceArray = np.empty((0, spec.dim // 2), np.float32)
        self._sin: DeviceArray = np.empty((0, spec.dim // 2), np.float32)
        self._complete = False

    def cos_sin(self, positions: DeviceArray) -> tuple[DeviceArray, DeviceArray]:
        """positions int64 [T] -> cos, sin float32 [T, R/2]."""
        if not self._complete:
            self._grow(int(positions.max()) + 1)
        return self._cos[positions], self._sin[positions]

    def tabulate(self, length: int, kernels: Kernels) -> None:
        """Fill the table for all positions below ``length`` and keep it where ``kernels`` compute.

        Positions are then looked up without being looked at, which on a GPU would mean waiting for it.
        """
        self._grow(length)
        self._cos, self._sin = kernels.to_device(self._cos), kernels.to_device(self._sin)
        self._complete = True

    def _grow(self, length: int) -> None:
        missing = length - len(self._cos)
        if missing > 0:
            # at least doubling keeps the copying linear in the longest sequence
            chunks = -(-max(missing, len(self._cos)) // _CHUNK)
            start, stop = len(self._cos), len(self._cos) + chunks * _CHUNK
            # angles are float32, as models were trained with
            angles = (np.arange(start, stop, dtype=np.float32)[:, None] * self.inv_freq).astype(np.float64)
            factor = np.float32(self.attention_factor)
            self._cos = np.concatenate([self._cos, np.cos(angles).astype(np.float32) * factor])
            self._sin = np.concatenate([self._sin, np.sin(angles).astype(np.float32) * factor])
