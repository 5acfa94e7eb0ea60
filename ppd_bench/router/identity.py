"""Whose turn is it? Requests of the OpenAI API carry no conversation, and a router that minds KV has to find it (B18 to B23).

In this order: an id that the client gives (header, body), ``session_params.session_id``, ``prompt_cache_key`` or ``user``
where that is wanted, the hash of everything up to the last answer, none. All are salted by model and tenant. An id names a
group: inside it, requests that do not follow one another (sub-agents, forks, edited histories, another system prompt) are
conversations of their own, since no engine holds the KV of the one for the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any, NamedTuple

from ppd_bench.router.chain import (
    UNKNOWN_ANSWER,
    AnswerMessage,
    Lengths,
    Mark,
    PromptHash,
    chat_answer,
    completion_answer,
    continues_last,
    digest,
    encode,
    prefix_fields,
    prompt_bytes,
    read_chat,
)

SESSION_HEADERS = ("x-session-id", "x-conversation-id")
SESSION_FIELDS = ("session_id", "conversation_id")
WEAK_FIELDS = ("prompt_cache_key", "user")
"""Ids that many conversations may share; used only where that is wanted."""

TTL_S = 3600.0
"""A conversation is forgotten after this long without a turn (paper, B.3: 60 minutes)."""
MAX_SESSIONS = 200_000
"""Most conversations kept; the longest unused leave first. About 0.5 KB each."""

EVICTIONS_PER_CALL = 4
"""More than one, so that the table shrinks; few, so that no request pays for an hour of others."""
MAX_ALIKE = 8
"""Conversations with the very same history that one request is compared with."""
MAX_TIPS = 2
"""Answers of a conversation's last turn, any of which its client may go on from."""


class Conversation:
    """A conversation. ``request``: hash of the last answered turn, ``pending``: of one that is not answered yet.

    ``keys``: under which it is found. The last ``n_tips`` are for the next turn, one per answer that the last turn got (two at
    most); those before are where the last turn itself was found, by which its retry is told from a fork. ``marks``: of
    completions, one per key, block and length after one another. ``used``: since the table last looked for something to forget.
    ``held``: what ``prompt_size`` remembers, ``sized``: of the turn under way only.
    """

    __slots__ = (
        "held",
        "keys",
        "last_s",
        "marks",
        "n_tips",
        "n_turns",
        "pending",
        "request",
        "session_id",
        "sized",
        "used",
    )

    def __init__(self, session_id: str, n_turns: int, now_s: float) -> None:
        self.session_id = session_id
        self.begin(n_turns, now_s)

    def begin(self, n_turns: int, now_s: float) -> None:
        self.n_turns = n_turns
        self.last_s = now_s
        self.request = self.pending = b""
        self.keys: tuple[bytes, ...] = ()
        self.marks: tuple[Any, ...] = ()
        self.n_tips = 0
        self.used = True
        self.held = b""
        self.sized: Any = None

    def is_tip(self, key: bytes) -> bool:
        return key in self.keys[len(self.keys) - self.n_tips :]

    def is_retried(self, key: bytes, request: bytes) -> bool:
        """Whether this request, found under this key, is one that came before."""
        return request == (self.pending if self.is_tip(key) else self.request)

    @property
    def n_answered_bytes(self) -> int:
        """Length of a completion's last prompt, with its answer where that is known; 0 for chats."""
        return self.marks[-1] if self.marks else 0

    def is_waiting(self, key: bytes) -> bool:
        """Whether it was answered at this key and nobody has gone on from there."""
        return not self.pending and self.is_tip(key)


class Identity(NamedTuple):
    """A turn of a conversation. ``turn`` counts from 1 and moves only with completed answers.

    ``source``: how it was found: header, body, session_params, prompt_cache_key, user, chain, or new. ``request``: the hash of
    what was asked, by which a retry is known. ``follows``: the conversation's last turn was answered here, and this one goes on
    from it, so that its KV may be held somewhere. ``root``: what hashes of its prompts begin with. ``conversation``: the table's
    entry, for what else is remembered of it.
    """

    session_id: str
    turn: int
    source: str
    request: bytes = b""
    follows: bool = False
    root: bytes = b""
    conversation: Conversation | None = None


class _Asked(NamedTuple):
    """A request as the table sees it. ``keys``: under which its predecessor may be found, the most telling first, and whether
    such a key vouches for the predecessor's answer.

    ``base``: what its own id would be made of, where that is stable over restarts. ``turn``: where no predecessor is known.
    ``source``: where its id stood, empty without one.
    """

    root: bytes
    request: bytes
    keys: Iterator[tuple[bytes, bool]]
    base: bytes | None
    turn: int
    source: str = ""


class Identifier:
    """The table of conversations. Pure: instants come in, nothing is read or waited for.

    ``salt`` makes ids of this process differ from others'. ``use_cache_key`` accepts ``prompt_cache_key`` and ``user``.
    """

    def __init__(
        self, *, ttl_s: float = TTL_S, salt: str = "", use_cache_key: bool = False, max_sessions: int = MAX_SESSIONS
    ) -> None:
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._salt = encode(salt)
        self._fields = WEAK_FIELDS if use_cache_key else ()
        self._by_id: dict[str, Conversation] = {}
        self._queue: deque[Conversation] = deque()  # the same, for a clock that looks for something to forget
        self._by_key: dict[bytes, Conversation | dict[str, Conversation]] = {}
        self._lengths = Lengths()
        self._n_new = 0

    @property
    def n_sessions(self) -> int:
        """Conversations in the table."""
        return len(self._by_id)

    def identify(
        self, *, headers: Mapping[str, str], body: Mapping[str, Any], now_s: float, tenant: str = ""
    ) -> Identity:
        """The conversation and turn of a request that is about to be routed.

        ``headers`` have lower-case names. ``tenant``: whatever separates users, such as a hash of the API key. Any JSON object
        gets an answer. Call ``answered`` or ``abandoned`` when the turn is over.
        """
        self._evict(now_s)
        name, source = self._explicit(headers, body)
        asked = self._read(body, name, source, tenant)
        for key, sure in asked.keys:
            session = self._at(key, sure, asked.request, now_s)
            if session is not None:
                return self._follow(session, key, asked, now_s)
        return self._begin(asked, asked.turn, asked.source or "new", now_s)

    def answered(
        self, identity: Identity, *, body: Mapping[str, Any], answer: str | AnswerMessage | None, now_s: float
    ) -> None:
        """A turn's answer is complete: the counter moves, once per turn however often it is answered.

        ``answer``: its text, or more of it; null where it is not known, which still finds the next turn unless two conversations
        began alike.
        """
        session = self._by_id.get(identity.session_id)
        if session is None:
            session = self._add(identity.session_id, identity.turn - 1, now_s)
        session.last_s, session.used = now_s, True
        if identity.turn == session.n_turns + 1:
            self._unlink(session, len(session.keys) - session.n_tips)
            session.n_turns, session.request, session.pending, session.n_tips = identity.turn, identity.request, b"", 0
        elif identity.turn != session.n_turns or identity.request != session.request:
            return  # an old turn's second answer: the conversation has moved on
        key, mark = self._tip(identity, body, answer)
        if key and not session.is_tip(key):
            self._link(session, key, mark)

    def abandoned(self, identity: Identity) -> None:
        """A turn ended without a complete answer. What comes next may ask something else and is still the same conversation."""
        session = self._by_id.get(identity.session_id)
        if session is not None and session.pending == identity.request:
            session.pending = b""

    # -- reading a request -------------------------------------------------------------------------------------------

    def _explicit(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> tuple[str, str]:
        """The id that the client gives and where it stands, or two empty strings."""
        for header in SESSION_HEADERS:
            if headers.get(header):
                return headers[header], "header"
        for field in SESSION_FIELDS:
            if name := _name(body.get(field)):
                return name, "body"
        params = body.get("session_params")
        if isinstance(params, Mapping) and (name := _name(params.get("session_id"))):
            return name, "session_params"
        for field in self._fields:
            if name := _name(body.get(field)):
                return name, field
        return "", ""

    def _read(self, body: Mapping[str, Any], name: str, source: str, tenant: str) -> _Asked:
        group = source if source in WEAK_FIELDS else "id"
        scope = digest(self._salt, *[encode(text) for text in (tenant, _name(body.get("model")), group, name)])
        root = digest(scope, prefix_fields(body))
        messages = body.get("messages")
        asked = _chat(root, body, messages) if isinstance(messages, list) else self._prompt(root, body.get("prompt"))
        return asked._replace(base=scope, source=source) if name else asked

    def _prompt(self, root: bytes, prompt: Any) -> _Asked:
        data = prompt_bytes(prompt)
        if data is None:
            return _Asked(root, digest(root, encode(ascii(prompt))), iter(()), None, 1)
        root = digest(root, encode(type(prompt).__name__))
        hashes = PromptHash(root, data)
        keys = _prompt_keys(hashes.known(self._lengths), len(data)) if self._lengths.n_blocks else iter(())
        return _Asked(root, hashes.whole(), keys, None, 1)

    def _tip(
        self, identity: Identity, body: Mapping[str, Any], answer: str | AnswerMessage | None
    ) -> tuple[bytes, Mark | None]:
        """The key of the turn after this one and, for a prompt, its mark."""
        if isinstance(body.get("messages"), list):
            return digest(identity.request, chat_answer(body, answer)), None
        data = prompt_bytes(body.get("prompt"))
        if data is None:
            return b"", None
        tail = completion_answer(body, answer)
        data += tail or b""
        hashes = PromptHash(identity.root, data)
        key = digest(identity.request, UNKNOWN_ANSWER) if tail is None else hashes.whole()
        return key, (hashes.block(), len(data))

    # -- finding conversations ---------------------------------------------------------------------------------------

    def _at(self, key: bytes, sure: bool, request: bytes, now_s: float) -> Conversation | None:
        """The conversation under a key that a request goes on with: the one that it retries, else one that waits for a turn,
        else any. Null without one, and where several conversations began alike and their answers are not known."""
        held = self._by_key.get(key)
        if held is None:
            return None
        if isinstance(held, Conversation):
            return None if self._is_over(held, now_s) else held
        if not sure:
            return None
        nearest = chain(islice(reversed(held.values()), 2), islice(held.values(), MAX_ALIKE))
        alive = [session for session in nearest if not self._is_over(session, now_s)]
        return min(alive, default=None, key=lambda s: (not s.is_retried(key, request), not s.is_waiting(key)))

    def _follow(self, session: Conversation, key: bytes, asked: _Asked, now_s: float) -> Identity:
        turn = session.n_turns + session.is_tip(key)
        source = asked.source or "chain"
        if not session.is_retried(key, asked.request) and not session.is_waiting(key):
            return self._begin(asked._replace(base=None), turn, source, now_s)
        if session.is_tip(key):
            session.pending = asked.request
        self._last_under(key, session)
        session.last_s, session.used = now_s, True
        return Identity(session.session_id, turn, source, asked.request, True, asked.root, session)

    def _begin(self, asked: _Asked, turn: int, source: str, now_s: float) -> Identity:
        """A conversation that this request does not go on from anything: a new one, or the one that its first try began."""
        for session_id in self._ids(asked, turn):
            session = self._by_id.get(session_id)
            if session is None or self._is_over(session, now_s):
                session = self._add(session_id, turn - 1, now_s)
                session.pending = asked.request
            elif asked.request not in (session.pending, session.request):
                continue
            session.last_s, session.used = now_s, True
            turn = session.n_turns + (session.pending == asked.request)
            return Identity(session_id, turn, source, asked.request, False, asked.root, session)
        raise AssertionError("the last id is always new")

    def _ids(self, asked: _Asked, turn: int) -> Iterator[str]:
        """Ids for a conversation, those first that another process would give it too. A first turn without an id of its client
        gets a new one each time: two users may well say the same."""
        if asked.base is not None:
            yield digest(b"base", asked.base).hex()
        if asked.source or turn > 1:
            yield digest(b"request", asked.request).hex()
        while True:
            self._n_new += 1
            session_id = digest(b"new", self._salt, asked.request, b"%d" % self._n_new).hex()
            if session_id not in self._by_id:
                yield session_id

    # -- the table ---------------------------------------------------------------------------------------------------

    def _add(self, session_id: str, n_turns: int, now_s: float) -> Conversation:
        """A new conversation; one of that id that is over begins anew."""
        session = self._by_id.get(session_id)
        if session is not None:
            self._unlink(session, len(session.keys))
            session.begin(n_turns, now_s)
            return session
        session = self._by_id[session_id] = Conversation(session_id, n_turns, now_s)
        self._queue.append(session)
        return session

    def _link(self, session: Conversation, key: bytes, mark: Mark | None) -> None:
        """Let the next turn find the conversation under one more key; of the last turn's answers the two latest are kept."""
        if session.n_tips == MAX_TIPS:
            self._unlink(session, 1, at=len(session.keys) - MAX_TIPS)
        session.keys += (key,)
        session.n_tips = min(session.n_tips + 1, MAX_TIPS)
        held = self._by_key.setdefault(key, session)
        if isinstance(held, dict):
            held[session.session_id] = session
        elif held is not session:
            self._by_key[key] = {held.session_id: held, session.session_id: session}
        if mark is not None:
            session.marks += mark
            self._lengths.add(*mark)

    def _unlink(self, session: Conversation, n_keys: int, *, at: int = 0) -> None:
        """Take away so many of a conversation's keys."""
        for key in session.keys[at : at + n_keys]:
            self._drop_key(session, key)
        session.keys = session.keys[:at] + session.keys[at + n_keys :]
        if session.marks:
            at, end = 2 * at, 2 * (at + n_keys)
            for i in range(at, min(end, len(session.marks)), 2):
                self._lengths.discard(session.marks[i], session.marks[i + 1])
            session.marks = session.marks[:at] + session.marks[end:]

    def _drop_key(self, session: Conversation, key: bytes) -> None:
        held = self._by_key.get(key)
        if isinstance(held, dict):
            held.pop(session.session_id, None)
            if len(held) == 1:
                self._by_key[key] = next(iter(held.values()))
        elif held is session:
            del self._by_key[key]

    def _last_under(self, key: bytes, session: Conversation) -> None:
        """Among conversations that began alike, the one that goes on waits behind the others from now on."""
        held = self._by_key.get(key)
        if isinstance(held, dict):
            held[session.session_id] = held.pop(session.session_id)

    def _evict(self, now_s: float) -> None:
        """Forget what is over and, in a full table, what was not used for a while: O(1), a clock with a second chance."""
        for _ in range(EVICTIONS_PER_CALL):
            if not self._queue:
                return
            session, full = self._queue[0], len(self._by_id) >= self._max_sessions
            if self._is_over(session, now_s) or (full and not session.used):
                self._forget(self._queue.popleft())
            elif session.used:
                session.used = False
                self._queue.rotate(-1)
            else:
                return
        if len(self._by_id) >= self._max_sessions:
            self._forget(self._queue.popleft())

    def _forget(self, session: Conversation) -> None:
        del self._by_id[session.session_id]
        self._unlink(session, len(session.keys))

    def _is_over(self, session: Conversation, now_s: float) -> bool:
        return session.last_s <= now_s - self._ttl_s


def _name(value: Any) -> str:
    """An id as clients give it; empty where there is none."""
    return str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""


def _chat(root: bytes, body: Mapping[str, Any], messages: list[Any]) -> _Asked:
    chat = read_chat(root, messages, continues_last=continues_last(body))
    prior = chat.prior
    keys = iter(()) if prior is None else ((digest(prior, form), form != UNKNOWN_ANSWER) for form in chat.answers)
    return _Asked(root, chat.request, keys, chat.first or None, chat.n_answers + 1)


def _prompt_keys(known: Iterator[tuple[int, bytes]], n_bytes: int) -> Iterator[tuple[bytes, bool]]:
    """Keys of a prompt's known beginnings: earlier prompts with their answers, or such whose answers nobody knows."""
    for length, found in known:
        yield found, True
        if length < n_bytes:
            yield digest(found, UNKNOWN_ANSWER), False
