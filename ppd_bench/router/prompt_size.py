"""How long is a prompt, and how much of it may be held already (ROUTER.md B25, B26), before any engine has counted it.

Token ids are counted. A follow-up's history is what usage said of the turn before; only what is new is estimated, by a
tokenizer where one is given, else by ``TokenModel`` and how this conversation's texts turned out so far.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from ppd_bench.core.errors import SpecError
from ppd_bench.engine.stream import StreamOutcome
from ppd_bench.router.chain import PREFIX_FIELDS, canonical, content_text, continues_last, encode, prompt_bytes
from ppd_bench.router.identity import Identity
from ppd_bench.router.token_model import CountTokens, Piece, TokenModel, Vector

MAX_MODELS = 64
OWN_WEIGHT_TOKENS = 50.0
"""A conversation's own texts count against the model's word as if that rested on so many tokens."""
OWN_MEMORY_TOKENS = 2000.0
"""Of a conversation, the latest so many tokens count most: what it is about may change."""
OWN_RANGE = (0.4, 2.5)
"""No conversation's texts are believed to differ more than this from what the model makes of them."""

REASONING_RATIO, REASONING_TOKENS = 3.0, 64.0
"""An answer of more tokens than so many times its text's, and so many more, was mostly reasoning."""

MAX_CHARS_PER_TOKEN = 8.0
"""No ordinary text has more; what passes by this is not looked at more closely."""

MAX_WRAP_TOKENS = 64
"""Most tokens that a template puts around a prompt or a message."""
MAX_MEDIA_TOKENS = 20_000


class PromptSize(NamedTuple):
    """``context_tokens``: history that was held after the conversation's last turn, 0 where none is known. ``input_tokens``: the
    rest of the prompt, 1 or more. ``source``: ids, usage (history by usage, the rest estimated), tokenizer or estimate."""

    context_tokens: int
    input_tokens: int
    source: str


class Held(NamedTuple):
    """What is remembered of a conversation's last answered turn, 29 bytes.

    ``extent``: how far its prompt went, in messages or in bytes. ``answer_is_new``: the next prompt has the answer beyond that.
    ``own_counted`` and ``own_predicted``: tokens of the conversation's texts as engines counted them, and as the model would.
    """

    turn: int
    prompt_tokens: int
    answer_tokens: int
    extent: int
    answer_is_new: bool
    own_counted: float
    own_predicted: float

    def packed(self) -> bytes:
        return _LAYOUT.pack(*self)


_LAYOUT = struct.Struct("<IIIQ?ff")


class PromptSizer:
    """Sizes prompts and learns from usage. ``count``: a tokenizer of the served model, see ``load_tokenizer``."""

    def __init__(self, *, count: CountTokens | None = None) -> None:
        self._count = count
        self._models: dict[str, TokenModel] = {}

    def size(self, identity: Identity, body: Mapping[str, Any]) -> PromptSize:
        """The size of a turn's prompt. Any JSON object gets one."""
        held = _held(identity)
        if held is not None and identity.turn == held.turn:
            return _size(held.prompt_tokens, held.prompt_tokens, "usage")
        follows = held is not None and identity.turn == held.turn + 1
        n_ids = _n_ids(body)
        if n_ids is not None:
            return _size(held.prompt_tokens + held.answer_tokens if held is not None and follows else 0, n_ids, "ids")
        if held is None or not follows:
            features = self._features(identity, body, piece := _whole(body))
            return _size(0, round(self._predict(body, piece, features)), "tokenizer" if self._count else "estimate")
        return self._size_of_follow_up(identity, body, held)

    def answered(self, identity: Identity, body: Mapping[str, Any], outcome: StreamOutcome) -> None:
        """A turn is complete: remember and learn what its engine counted. Call it after ``Identifier.answered``."""
        conversation, prompt_tokens = identity.conversation, outcome.prompt_tokens
        if conversation is None or prompt_tokens is None or _is_several(body):
            return
        counted, predicted = self._learn(identity, body, _held(identity), prompt_tokens)
        extent, answer_is_new = _extent(body, conversation.n_answered_bytes)
        held = Held(
            turn=identity.turn,
            prompt_tokens=prompt_tokens,
            answer_tokens=outcome.completion_tokens or 0,
            extent=extent,
            answer_is_new=answer_is_new,
            own_counted=counted,
            own_predicted=predicted,
        )
        conversation.held, conversation.sized = held.packed(), None

    def _features(self, identity: Identity, body: Mapping[str, Any], piece: Piece) -> Vector:
        """What of a turn's new piece counts. It takes a look at every byte, and is wanted when the turn comes and when it is
        answered: kept in between."""
        conversation = identity.conversation
        if conversation is None:
            return self._model(body).features(piece)
        key = (identity.request, conversation.held, len(piece.text), piece.n_messages)
        if conversation.sized is None or conversation.sized[0] != key:
            conversation.sized = key, self._model(body).features(piece)
        features: Vector = conversation.sized[1]
        return features

    def _size_of_follow_up(self, identity: Identity, body: Mapping[str, Any], held: Held) -> PromptSize:
        piece, answer = _added(body, held)
        kept, is_held = self._kept(body, held, answer)
        new = self._predict(body, piece, self._features(identity, body, piece), self._own(body, held, answer))
        if held.answer_is_new:
            new -= held.answer_tokens
        total = held.prompt_tokens + kept + max(1, round(new))
        return _size(held.prompt_tokens + kept if is_held else held.prompt_tokens, total, "usage")

    def _kept(self, body: Mapping[str, Any], held: Held, answer: str) -> tuple[int, bool]:
        """Tokens that the last answer has in the next prompt, and whether its KV can be used again: where an engine counted far
        more than its text has, the rest was reasoning, which clients and templates drop."""
        fewest = len(answer) / MAX_CHARS_PER_TOKEN
        if not answer or held.answer_tokens <= REASONING_RATIO * fewest + REASONING_TOKENS:
            return held.answer_tokens, True
        model = self._model(body)
        predicted = model.predict(model.features(Piece(answer)))
        if held.answer_tokens <= REASONING_RATIO * predicted + REASONING_TOKENS:
            return held.answer_tokens, True
        return round(predicted), False

    def _predict(
        self, body: Mapping[str, Any], piece: Piece, features: Vector, own: tuple[float, float] = (0.0, 0.0)
    ) -> float:
        """Tokens of a piece by the model and, where nothing counts exactly, by how the conversation's texts turned out.

        Bounded by what byte-level tokens can be: at most one per byte.
        """
        predicted = self._model(body).predict(features)
        if self._count is None:
            ratio = (own[0] + OWN_WEIGHT_TOKENS) / (own[1] + OWN_WEIGHT_TOKENS)
            predicted *= max(OWN_RANGE[0], min(OWN_RANGE[1], ratio))
        limit = len(encode(piece.text)) + MAX_WRAP_TOKENS * (1 + piece.n_messages) + MAX_MEDIA_TOKENS * piece.n_media
        return min(predicted, float(limit))

    def _own(self, body: Mapping[str, Any], held: Held, answer: str) -> tuple[float, float]:
        """Counted and predicted tokens of the conversation's texts; its last answer, which an engine counted, among them."""
        if self._count is not None or not answer or not self._kept(body, held, answer)[1]:
            return held.own_counted, held.own_predicted
        model = self._model(body)
        predicted = model.predict(model.features(Piece(answer)))
        return held.own_counted + held.answer_tokens, held.own_predicted + predicted

    def _learn(
        self, identity: Identity, body: Mapping[str, Any], held: Held | None, prompt_tokens: int
    ) -> tuple[float, float]:
        """Teach the model what this turn added; the sums of the conversation's own texts after it."""
        turn = identity.turn
        if _n_ids(body) is not None:
            return 0.0, 0.0
        if held is not None and turn == held.turn:
            return held.own_counted, held.own_predicted
        if held is None or turn != held.turn + 1:
            piece, counted, own = _whole(body), prompt_tokens, (0.0, 0.0)
        else:
            piece, answer = _added(body, held)
            kept = 0 if held.answer_is_new else self._kept(body, held, answer)[0]
            counted = prompt_tokens - held.prompt_tokens - kept
            own = self._own(body, held, answer)
        if counted <= 0:  # the model's template dropped something of the history
            return own
        model = self._model(body)
        features = self._features(identity, body, piece)
        predicted = model.predict(features)
        model.learn(features, counted)
        fade = min(1.0, OWN_MEMORY_TOKENS / (own[0] + 1.0))
        return own[0] * fade + counted, own[1] * fade + predicted

    def _model(self, body: Mapping[str, Any]) -> TokenModel:
        name = str(body.get("model") or "")
        if name not in self._models:
            if len(self._models) >= MAX_MODELS:
                del self._models[next(iter(self._models))]
            self._models[name] = TokenModel(self._count)
        return self._models[name]


def load_tokenizer(path: Path) -> CountTokens:
    """A tokenizer from a ``tokenizer.json``, or from a model folder with one.

    Raises:
        SpecError: the package ``tokenizers`` is missing, or the file is none that it reads.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        read = importlib.import_module("tokenizers").Tokenizer.from_file
    except ImportError as error:
        raise SpecError(
            "a tokenizer was given, and the package 'tokenizers' is missing; run: pip install tokenizers"
        ) from error
    try:
        tokenizer = read(str(file))
    except Exception as error:  # what the package raises has no type of its own
        raise SpecError(f"{file}: not a tokenizer ({error}); give the model's tokenizer.json") from error
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


# -- parts of bodies -------------------------------------------------------------------------------------------------


def _held(identity: Identity) -> Held | None:
    packed = identity.conversation.held if identity.conversation is not None else b""
    return Held(*_LAYOUT.unpack(packed)) if packed else None


def _size(history: int, total: int, source: str) -> PromptSize:
    """At least one token is always computed, however much is held."""
    context = max(0, min(history, total - 1))
    return PromptSize(context, max(1, total - context), source)


def _n_ids(body: Mapping[str, Any]) -> int | None:
    """Token ids of the prompt, of all prompts where it is a list of them; null where it is text."""
    prompt = body.get("prompt")
    if "messages" in body or not isinstance(prompt, list) or not prompt:
        return None
    if all(isinstance(ids, list) for ids in prompt):
        return sum(map(len, prompt))
    return len(prompt) if isinstance(prompt[0], int) else None


def _is_several(body: Mapping[str, Any]) -> bool:
    """Whether usage counts several prompts or answers."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return several or body.get("n") not in (None, 1) or body.get("best_of") not in (None, 1)


def _whole(body: Mapping[str, Any]) -> Piece:
    """All that a first prompt is made of."""
    messages, prompt = body.get("messages"), body.get("prompt")
    if isinstance(messages, list):
        fields = [canonical(body[name]).decode("utf-8", "replace") for name in PREFIX_FIELDS[:3] if body.get(name)]
        return _of_messages(messages, extra=fields, is_first=True)
    texts = prompt if isinstance(prompt, list) else [prompt]
    return Piece("".join(text for text in texts if isinstance(text, str)), is_first=True)


def _added(body: Mapping[str, Any], held: Held) -> tuple[Piece, str]:
    """What a follow-up has beyond its counted history, and the text of the answer between them where that is a message."""
    messages = body.get("messages")
    if isinstance(messages, list):
        answer = messages[held.extent : held.extent + 1]
        text = content_text(answer[0].get("content")) if answer and isinstance(answer[0], Mapping) else ""
        return _of_messages(messages[held.extent + 1 :], is_first=False), text
    data = prompt_bytes(body.get("prompt")) or b""
    return Piece(data[held.extent :].decode("utf-8", "replace")), ""


def _extent(body: Mapping[str, Any], n_answered_bytes: int) -> tuple[int, bool]:
    """How far a turn's prompt goes, with a completion's answer where its bytes are known, and whether they are not."""
    messages = body.get("messages")
    if isinstance(messages, list):
        return len(messages) - continues_last(body), False
    n_bytes = len(prompt_bytes(body.get("prompt")) or b"")
    return max(n_bytes, n_answered_bytes), n_answered_bytes <= n_bytes


def _of_messages(messages: Sequence[Any], *, extra: Sequence[str] = (), is_first: bool) -> Piece:
    texts, n_media = list(extra), 0
    for message in messages:
        if not isinstance(message, Mapping):
            continue
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        for part in parts:
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                texts.append(text)
            elif isinstance(part, Mapping) and part.get("type") not in (None, "text"):
                n_media += 1
        if calls := message.get("tool_calls"):
            texts.append(orjson.dumps(calls).decode())
    return Piece("".join(texts), len(messages), is_first, not is_first, n_media)
