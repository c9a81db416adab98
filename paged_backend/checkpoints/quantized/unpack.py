"""Codes of a few bits out of the words that hold them."""

from __future__ import annotations

import numpy as np

from paged_backend.kernels.array import Array


def unpack(words: Array, bits: int) -> Array:
    """Codes of ``bits`` bits, lowest first, that follow each other through [..., W] integers -> uint8 [..., n].

    A code may begin in one word and end in the next; bits that make no whole code at the end are left out.
    """
    # a file's integers are little endian: their bytes are one stream of bits
    stream = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return stream
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        return (stream[..., None] >> shifts & (2**bits - 1)).reshape(*stream.shape[:-1], -1)
    count = stream.shape[-1] * 8 // bits
    single = np.unpackbits(stream, axis=-1, bitorder="little")[..., : count * bits]
    return _join(single.reshape(*stream.shape[:-1], count, bits))


def unpack_words(words: Array, bits: int) -> Array:
    """As :func:`unpack` of int32 words that each hold 32 // bits whole codes; their highest bits may be unused."""
    if 32 % bits == 0:
        return unpack(words, bits)
    stream = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    count = 32 // bits
    single = np.unpackbits(stream, axis=-1, bitorder="little")[..., : count * bits]
    return _join(single.reshape(*words.shape[:-1], -1, bits))


def _join(single: Array) -> Array:
    """uint8 [..., bits] of single bits, lowest first -> uint8 [...]."""
    codes = np.zeros(single.shape[:-1], np.uint8)
    for bit in range(single.shape[-1]):
        codes |= single[..., bit] << bit
    return codes
