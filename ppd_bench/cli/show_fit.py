"""How a table fits a narrow terminal: words stay whole, and columns that find no room follow in a further table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

RULES = 3
"""Characters that a column takes beside its text: two blanks and a rule; the table has one rule more."""

Fitted = list[tuple[int, int]]
"""Columns of one table: number and width in characters."""


def fitted(columns: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> list[Fitted]:
    """The columns in tables of at most ``room`` characters; the first column, which names the rows, leads each of them.

    Where columns have to give way, those of several words wrap, the widest first. A word is broken only where it alone takes more
    than half of the room.
    """
    texts = [[name, *(row[index] for row in rows)] for index, name in enumerate(columns)]
    longest_word = max(1, room // 2 - RULES)
    least = [min(longest_word, max(len(word) for text in of for word in (text.split() or [""]))) for of in texts]
    most = [max(len(line) for text in of for line in (text.splitlines() or [""])) for of in texts]
    return [_shared(block, least, most, room) for block in _blocks(least, room)]


def _blocks(least: Sequence[int], room: int) -> list[list[int]]:
    """As few blocks as can be, and these about equally wide."""
    n = len(_filled(least, room))
    return next(blocks for limit in range(room + 1) if len(blocks := _filled(least, limit)) == n)


def _filled(least: Sequence[int], room: int) -> list[list[int]]:
    blocks: list[list[int]] = [[0]]
    for index in range(1, len(least)):
        block = [*blocks[-1], index]
        if _width(least[k] for k in block) <= room or len(block) <= 2:
            blocks[-1] = block
        else:
            blocks.append([0, index])
    return blocks


def _width(widths: Iterable[int]) -> int:
    return 1 + sum(width + RULES for width in widths)


def _shared(block: Sequence[int], least: Sequence[int], most: Sequence[int], room: int) -> Fitted:
    """Every column as wide as its texts where there is room, else the widest of those that can wrap give way."""
    widths = {index: most[index] for index in block}
    while _width(widths.values()) > room:
        can_wrap = [index for index in block if widths[index] > least[index]]
        if not can_wrap:
            break
        widths[max(can_wrap, key=lambda index: widths[index])] -= 1
    return list(widths.items())
