"""Tokens from bytes, learnt from what engines count: a linear model over kinds of bytes, with its own uncertainty.

English, Chinese, code and JSON differ by a factor of four in characters per token, and so do tokenizers. Kinds of bytes tell
texts apart, and usage of earlier answers tells what each is worth to the tokenizer in use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

CountTokens = Callable[[str], int]
"""A tokenizer: the tokens of a text, without special ones."""

MAX_READ_BYTES = 32_768
MAX_COUNTED_CHARS = 16_384
N_SLICES = 16
"""A longer text is read in so many slices of equal length, spread over it, and scaled up: routing must not wait for it. Looking
at kinds of bytes takes microseconds, a tokenizer about a millisecond for 4,000 characters."""


def _kinds_of_bytes() -> Vector:
    """Byte (256) x kind (9): lower case, upper case, digits, space, line ends and tabs, other ASCII, and the first bytes of
    characters that take two, three and four bytes."""
    ranges = (b"az", b"AZ", b"09", b"  ", b"\t\r", b"\x00\x7f", b"\xc0\xdf", b"\xe0\xef", b"\xf0\xff")
    kinds = np.zeros((256, len(ranges)))
    for kind, (first, last) in enumerate(ranges):
        kinds[first : last + 1, kind] = 1.0
    kinds[:, 5] -= kinds[:, :5].sum(axis=1)
    return kinds


_KIND_PRIOR = (0.2, 0.4, 0.5, 0.1, 0.4, 0.6, 0.7, 0.7, 2.0)
_OUTSIDE_PRIOR = (4.0, 8.0, 4.0, 500.0)
"""Tokens that are in no text: per message, of a first prompt (its beginning, a default system text), of a follow-up (the next
answer's header), and per image or sound."""

TOKENIZER_STEP_RATIO = 0.001
PRIOR_RATIO = 0.5
DRIFT_RATIO = 0.005
BYTES_NOISE = (0.08, 2.0)
COUNT_NOISE = (0.005, 0.5)
"""Spread of what engines count around what a good model makes of bytes, or of a tokenizer's counts: a share, and tokens."""
MAX_SURPRISE = 3.0
"""A count further away than so many standard deviations teaches as if it were so far: one odd prompt must not spoil the model."""


class Piece(NamedTuple):
    """Something that becomes tokens. ``n_messages``: messages that wrap it. ``is_first``: it begins a prompt."""

    text: str
    n_messages: int = 0
    is_first: bool = False
    is_follow: bool = False
    n_media: int = 0


class TokenModel:
    """Predicts and learns (recursive least squares from a prior, with slow forgetting). With ``count`` texts are counted by a
    tokenizer, and only what is outside of texts is learnt."""

    def __init__(self, count: CountTokens | None = None) -> None:
        self._count = count
        self._kinds = _kinds_of_bytes()
        self._noise = COUNT_NOISE if count else BYTES_NOISE
        text = (1.0,) if count else _KIND_PRIOR
        steps = (TOKENIZER_STEP_RATIO,) if count else tuple(PRIOR_RATIO * weight for weight in text)
        self._weights = np.array(text + _OUTSIDE_PRIOR)
        self._spread = np.diag(np.square(steps + tuple(PRIOR_RATIO * weight for weight in _OUTSIDE_PRIOR)))
        self._drift = np.diag(np.square(DRIFT_RATIO * np.sqrt(np.diag(self._spread)) / PRIOR_RATIO))

    def features(self, piece: Piece) -> Vector:
        """What of a piece counts."""
        outside = [piece.n_messages, piece.is_first, piece.is_follow, piece.n_media]
        return np.concatenate((self._text_features(piece.text), np.array(outside, dtype=np.float64)))

    def predict(self, features: Vector) -> float:
        """Tokens of a piece with these features, at least none."""
        return max(0.0, float(features @ self._weights))

    def learn(self, features: Vector, n_tokens: int) -> None:
        """An engine counted so many."""
        direction = self._spread @ features
        ratio, tokens = self._noise
        variance = float(features @ direction) + (ratio * n_tokens + tokens) ** 2
        limit = MAX_SURPRISE * variance**0.5
        surprise = n_tokens - float(features @ self._weights)
        self._weights += direction * (max(-limit, min(limit, surprise)) / variance)
        self._spread += self._drift - np.outer(direction, direction) / variance

    def _text_features(self, text: str) -> Vector:
        if self._count is None:
            data = text.encode("utf-8", "surrogatepass")
            read = data if len(data) <= MAX_READ_BYTES else _slices(data)
            counts = np.bincount(np.frombuffer(read, dtype=np.uint8), minlength=256)
            scaled: Vector = (counts @ self._kinds) * (len(data) / max(1, len(read)))
            return scaled
        if len(text) <= MAX_COUNTED_CHARS:
            return np.array([float(self._count(text))])
        n_chars = MAX_COUNTED_CHARS // N_SLICES
        starts = [i * (len(text) - n_chars) // (N_SLICES - 1) for i in range(N_SLICES)]
        n_tokens = sum(self._count(text[start : start + n_chars]) for start in starts)
        return np.array([n_tokens * len(text) / (n_chars * N_SLICES)])


def _slices(data: bytes) -> bytes:
    n_bytes = MAX_READ_BYTES // N_SLICES
    starts = [i * (len(data) - n_bytes) // (N_SLICES - 1) for i in range(N_SLICES)]
    return b"".join([data[start : start + n_bytes] for start in starts])
