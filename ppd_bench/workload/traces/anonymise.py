"""Traces without names: ids of sessions, requests and blocks replaced by keyed hashes; lengths and times stay.

Without the salt an id cannot be computed from what it stood for, nor compared with another release; equal ids stay equal, so
prefix reuse and sessions are as before. Lengths, arrivals and the shape of sharing are not hidden: who knows those of a
request finds it.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator
from hashlib import blake2b

from ppd_bench.core.errors import SpecError
from ppd_bench.core.trace import TraceRow

MIN_SALT_BYTES = 16
_ID = struct.Struct("<q")
_MASK = (1 << 63) - 1
_NAME, _BLOCK = b"name", b"block"
"""Kinds of ids, so that a session and a block of the same number have nothing in common."""


def anonymous_rows(rows: Iterable[TraceRow], salt: bytes) -> Iterator[TraceRow]:
    """The rows under a salt, which is 16 to 64 bytes and kept by nobody.

    Raises:
        SpecError: a salt of another length.
    """
    if not MIN_SALT_BYTES <= len(salt) <= 64:
        raise SpecError(f"a salt has 16 to 64 bytes, not {len(salt)}")
    for row in rows:
        yield row._replace(
            request_id=_name(row.request_id, salt),
            session_id=None if row.session_id is None else _name(row.session_id, salt),
            parent_id=None if row.parent_id is None else _name(row.parent_id, salt),
            block_ids=_blocks(row.block_ids, salt),
        )


def _name(name: str, salt: bytes) -> str:
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=10, key=salt, person=_NAME).hexdigest()


def _blocks(ids: Iterable[int], salt: bytes) -> array[int]:
    base = blake2b(digest_size=8, key=salt, person=_BLOCK)
    found = array("q")
    for block_id in ids:
        one = base.copy()  # a keyed hash begins with a block of its key: made once
        one.update(_ID.pack(block_id))
        found.append(_ID.unpack(one.digest())[0] & _MASK)
    return found
