"""Block ids made here: each is a hash of a block's content and of the id before it, so that it stands for its whole prefix.

As vLLM chains its block hashes (vllm/v1/core/kv_cache_utils.py, hash_block_tokens). 63 bits of BLAKE2b: the same on every
machine, and among a hundred million ids two are equal by chance once in a thousand traces.
"""

from __future__ import annotations

import struct
from array import array
from hashlib import blake2b

_MASK = (1 << 63) - 1
_ID = struct.Struct("<q")
_PART = struct.Struct("<bqII")


def text_id(text: str) -> int:
    """A 63-bit id of a text, for content that belongs to a named thing alone."""
    return _number(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())


def _chained(before: int, content: bytes) -> int:
    return _number(blake2b(content, digest_size=8, key=_ID.pack(before)).digest())


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "little") & _MASK


class TokenBlocks:
    """A growing sequence of tokens and the ids of its full blocks."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._open = array("I")
        self.ids: array[int] = array("q")

    @property
    def n_tokens(self) -> int:
        return len(self.ids) * self._block_tokens + len(self._open)

    def extend(self, tokens: array[int]) -> None:
        self._open.extend(tokens)
        step, n_full = self._block_tokens, len(self._open) // self._block_tokens
        before = self.ids[-1] if self.ids else 0
        for start in range(0, n_full * step, step):
            before = _chained(before, self._open[start : start + step].tobytes())
            self.ids.append(before)
        del self._open[: n_full * step]

    def peek(self, tokens: array[int]) -> array[int]:
        """The ids that there would be after ``extend(tokens)``, as a copy."""
        ahead = TokenBlocks(self._block_tokens)
        ahead.ids, ahead._open = self.ids[:], self._open[:]
        ahead.extend(tokens)
        return ahead.ids


class PartBlocks:
    """The same for tokens that are known only as pieces of named content: (kind, id of the content, offset, length)."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._parts: list[bytes] = []
        self._filled = 0
        self.ids: array[int] = array("q")

    @property
    def n_tokens(self) -> int:
        return len(self.ids) * self._block_tokens + self._filled

    def extend(self, kind: int, content_id: int, n_tokens: int) -> None:
        offset = 0
        while offset < n_tokens:
            taken = min(n_tokens - offset, self._block_tokens - self._filled)
            self._parts.append(_PART.pack(kind, content_id, offset, taken))
            offset += taken
            self._filled += taken
            if self._filled == self._block_tokens:
                self.ids.append(_chained(self.ids[-1] if self.ids else 0, b"".join(self._parts)))
                self._parts.clear()
                self._filled = 0
