r"""Makes a pickle harmless while the unpickler reads it: each opcode is looked at, and paid for, before it runs.

`hfdcp_core.distcp_file` lets an unpickler resolve only the few globals that writers of DCP use. That stops code from
being called, but a pickle has other weapons: a length prefix of an exabyte, a memo index that makes the unpickler
allocate gigabytes, and dictionary keys whose hash takes for ever (nested tuples that share their parts) or overflows
the C stack. So every pickle is cut into opcodes, without executing any, and handed on in frames of our own:

1. An opcode that no writer of DCP uses is refused by name: sets, extension codes, decimal numbers, `INST` and so on.
2. A length prefix must fit into the bytes that are left, and a memo index to the bytes that came before.
3. Dictionaries become flat lists (``}`` → ``]``, ``u`` → ``e``, ``s`` → ``\x86a``): nothing is hashed while the pickle
   is loaded, and no dictionary exists that a BUILD could use to change attributes. `pairs` reads such lists.
4. The writer's frames are dropped. Ours are small, so that the pickle is never copied as a whole.
5. What the opcodes of a frame will take of memory is taken off a `Budget` before the frame is handed on. A pickle that
   makes more of its bytes than the budget has is refused in time, however it mixes its opcodes.

Opcodes without a length prefix are matched in runs by one regular expression, so that Python code runs only for the
others. A run has none of ``}u(et`` inside of an argument, so that it can be translated as a whole, and its groups, from
a mark to what closes it, be told without cutting it into opcodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from hfdcp_core.errors import CorruptFile, SourceError, UnsafePickle

_ANY = rb"[^}u(et]"
_RUN = (
    rb"(?:[()N\x88\x89\]}aetu\x85\x86\x87\x94\x93R\x81b]++|[Khq]_|M__|[Jj]____|G________"
    rb"|\x8a(?:\x04____|\x05_____|\x06______)%s)*+"
).replace(b"_", _ANY)
"""Opcodes of fixed length that need no look: constants, lists, tuples, memo, calls (the unpickler checks globals)."""
_SPECIAL = b"}u(et"
_LONGEST_INTEGER = 9
"""Bytes of the longest integer that any count of bytes or elements needs: 64 bits and a sign."""
_ODD = rb"[Khq].|M..|[Jj]....|G........|\x8a(?:%s)|[\x8cC](?:%s)|X(?:%s)" % tuple(
    b"|".join(re.escape(bytes([length])) + rest + rb".{%d}" % length for length in range(most + 1))
    for most, rest in ((_LONGEST_INTEGER, b""), (255, b""), (255, rb"\0\0\0"))
)
"""The same where an argument has a byte that means something else as an opcode, other integers, and short texts."""
_FIXED = b"()N\x88\x89]}aetu\x85\x86\x87\x94\x93R\x81bKhqMJjG"
_REFUSED = {
    b"0": "POP", b"1": "POP_MARK", b"2": "DUP", b"F": "FLOAT", b"I": "INT", b"L": "LONG", b"S": "STRING",
    b"T": "BINSTRING", b"U": "SHORT_BINSTRING", b"V": "UNICODE", b"d": "DICT", b"l": "LIST", b"g": "GET", b"p": "PUT",
    b"P": "PERSID", b"Q": "BINPERSID", b"i": "INST", b"o": "OBJ", b"\x80": "PROTO", b"\x82": "EXT1", b"\x83": "EXT2",
    b"\x84": "EXT4", b"\x8b": "LONG4", b"\x8f": "EMPTY_SET", b"\x90": "ADDITEMS", b"\x91": "FROZENSET",
    b"\x92": "NEWOBJ_EX", b"\x96": "BYTEARRAY8", b"\x97": "NEXT_BUFFER", b"\x98": "READONLY_BUFFER",
}  # fmt: skip
_PREFIX_BYTES = {b"\x8c": 1, b"X": 4, b"\x8d": 8, b"C": 1, b"B": 4, b"\x8e": 8, b"\x8a": 1}
"""Opcodes of strings, bytes and long integers, and how many bytes their length takes."""
_STOP, _LONG1, _SETITEM, _FRAME, _LONG_BINPUT = b".", b"\x8a", b"s", b"\x95", b"r"
_FLAT = bytes.maketrans(b"}u", b"]e")
_PAIR = b"\x86a"
"""What stands for a SETITEM: TUPLE2, APPEND."""
_COUNTED_AS = dict.fromkeys((b"X", b"\x8d", b"C", b"B", b"\x8e"), b"\x8c") | {
    _SETITEM: _PAIR,
    _FRAME: b"",
    _LONG_BINPUT: b"",
    b"Q": b"\x86",
    b"c": b"N",
}
"""How the costs of opcodes are counted that are no constants; the bytes of a text are counted apart."""
_MOST_IN_FRAME = 1 << 16
_GLOBAL_NAME = re.compile(rb"([^\n]{1,300})\n([^\n]{1,300})\n")
_PROTOCOLS = range(2, 6)
_MEMOIZES = 4
"""The protocol from which on memo places are counted by MEMOIZE."""

_PLACE = 9
"""Memory of a place on the stack or in a list or tuple, an eighth of which is kept free for more."""
_KEPT = {
    b"N": _PLACE, b"\x88": _PLACE, b"\x89": _PLACE, b")": _PLACE, b"K": _PLACE, b"h": _PLACE, b"j": _PLACE,
    b"M": _PLACE + 32, b"J": _PLACE + 32, b"G": _PLACE + 32, b"\x8a": _PLACE + 48, b"\x8c": _PLACE + 64,
    b"]": 96, b"a": 4, b"e": 20, b"\x81": 78, b"b": 4, b"t": 57, b"\x85": 48, b"\x86": 55, b"\x87": 46,
}  # fmt: skip
"""Memory that is kept of an opcode at most, by CPython's sizes: objects with their headers, rounded up as the allocator
does, and a place for each in the list or tuple that it ends in. A list has room for four items at least and, while it
is short, for twice its items; those have paid one place each. What an argument looks like is counted as well: it makes
the sum larger, never smaller.
"""
_LENT = dict.fromkeys(
    (b"N", b"\x88", b"\x89", b")", b"K", b"h", b"j", b"M", b"J", b"G", b"\x8a", b"\x8c", b"]"), _PLACE
)
_LENT[b"("] = 24
"""Memory that an opcode takes on the stack, and a mark among the marks, until they are closed."""
_LIST_GROUP, _TUPLE_GROUP = re.compile(rb"\([^(et]*+e"), re.compile(rb"\([^(et]*+t")
_NESTED_GROUPS = 2
"""How deep groups lie in groups in most of a writer's pickle; deeper ones are only counted as more than they take."""
_MEMO_PLACE = 16
"""The memo grows by doubling."""
_WIDE_TEXT, _WIDE = 32, 4
"""A text that is not ASCII takes so much more, and for each of its bytes four at worst."""
_PUT_BYTES = 6
"""A LONG_BINPUT and the shortest object that it puts: no writer's memo index is above a sixth of the position."""
_TIMES, _BESIDES = 15, 24 << 20
"""The budget of a pickle: so many times its size, and so much besides.

Reading may take 16 times the size and 64 MiB: the pickle itself takes its size once, and what the allocator wastes, by
growing arrays that it cannot move for instance, is not counted.
"""


class Budget:
    """How much memory reading one pickle may still take; both who loads it and who builds values from it spend it."""

    def __init__(self, where: str, size: int) -> None:
        """Grant what a pickle of ``size`` bytes may take."""
        self.size = size
        self._where = where
        self._left = self._granted = _TIMES * size + _BESIDES
        self._lent = 0

    def spend(self, cost: int) -> None:
        """Take some memory off the budget, before it is allocated."""
        self._left -= cost
        if self._left < 0:
            raise CorruptFile(
                f"{self._where}: its {self.size} bytes would take more than {self._granted} bytes of memory, "
                "as no writer's do"
            )

    def lend(self, cost: int) -> None:
        """Take memory off the budget that will be free again after this step."""
        self._lent += cost
        self.spend(cost)

    def take_back(self) -> None:
        """Put back what was lent."""
        self._left += self._lent
        self._lent = 0


@dataclass(frozen=True, slots=True)
class Rules:
    """What a pickle may do, beyond the opcodes that are always allowed."""

    where: str
    """Which pickle it is, for messages."""
    check_global: Callable[[str, str], object]
    """Called with module and name of every global that an opcode spells out; raises for one that is refused."""
    budget: Budget
    """What loading it may take."""
    persistent_ids: bool = False
    """Whether it may name persistent ids, as the pickle in a ``torch.save`` archive does for its storages."""


class TamePickle:
    r"""The same pickle as a file for the unpickler, its dictionaries turned into flat lists, looked at as it is read.

    Its methods raise `CorruptFile` where it is cut off, has bytes behind its end, costs too much, or is no pickle of
    protocol 2 to 5, and `UnsafePickle` where it uses an opcode, or spells out a global, that no writer of DCP uses.

    >>> raw = b"\x80\x04}\x8c\x01aK\x01s."
    >>> TamePickle(raw, Rules("here", lambda module, name: None, Budget("here", len(raw)))).read(99)[11:]
    b']\x8c\x01aK\x01\x86a.'
    """

    def __init__(self, raw: bytes, rules: Rules) -> None:
        """Read the pickle ``raw``, which is no frame of anything larger."""
        self._pieces = _pieces(raw, rules)
        self._piece = b""

    def read(self, size: int, /) -> bytes:
        """Return the next bytes; fewer only at the end."""
        while len(self._piece) < size and (more := next(self._pieces, b"")):
            self._piece += more
        found, self._piece = self._piece[:size], self._piece[size:]
        return found

    def readline(self) -> bytes:
        """Return nothing: no line reaches over the end of a frame."""
        return b""


def _pieces(raw: bytes, rules: Rules) -> Iterator[bytes]:
    """Yield the harmless pickle: its start, then each frame and what announces it."""
    if len(raw) < 2 or raw[0] != 0x80 or raw[1] not in _PROTOCOLS:
        raise CorruptFile(f"{rules.where}: not a pickle of protocol 2 to 5: it begins with {raw[:8]!r}")
    yield b"\x80\x04"
    for frame in _frames(raw, rules):
        yield _FRAME + len(frame).to_bytes(8, "little")
        yield frame


def _frames(raw: bytes, rules: Rules) -> Iterator[bytes]:
    """Yield the opcodes behind the start, each looked at and paid for."""
    match = _run_of(raw, rules).match
    start = position = 2
    frame, codes, text = list[bytes](), list[bytes](), 0
    while True:
        run = match(raw, position, position + _MOST_IN_FRAME)
        assert run is not None  # it matches the empty run, too
        piece, odd = run.groups()
        position = run.end()
        if piece:
            piece = piece.translate(_FLAT)
            frame.append(piece)
            codes.append(piece)
        if odd:
            frame.append(odd)
            codes.append(_COUNTED_AS.get(odd[:1], odd[:1]))
            text += len(odd) if odd[2:].isascii() else _WIDE_TEXT + _WIDE * len(odd)
        elif (code := raw[position : position + 1]) == _STOP:
            break
        elif not code or code not in _FIXED:
            position, piece = _skip(raw, position, rules)
            frame.append(piece)
            codes.append(_COUNTED_AS.get(code, code))
        elif not piece:  # else the run was only cut off at the end of what was searched
            raise _refusal(raw, position, rules.where)
        if position - start >= _MOST_IN_FRAME:
            _pay(codes, text, rules)
            whole = b"".join(frame)
            start, frame, codes, text = position, [], [], 0  # a long text is not kept twice
            yield whole
    if position + 1 != len(raw):
        raise CorruptFile(f"{rules.where}: {len(raw) - position - 1} bytes behind the end of the pickle")
    _pay(codes, text, rules)
    yield b"".join([*frame, _STOP])


def _pay(codes: list[bytes], text: int, rules: Rules) -> None:
    joined = b"".join(codes)
    rules.budget.spend(_cost(joined, _KEPT) + text)
    rules.budget.lend(_MEMO_PLACE * (joined.count(b"\x94") + joined.count(b"q")))
    for _ in range(_NESTED_GROUPS):
        joined = _TUPLE_GROUP.sub(b"N", _LIST_GROUP.sub(b"", joined))
    rules.budget.lend(_cost(joined, _LENT))


def _cost(codes: bytes, table: Mapping[bytes, int]) -> int:
    return sum(cost * codes.count(code) for code, cost in table.items())


def _run_of(raw: bytes, rules: Rules) -> re.Pattern[bytes]:
    """Return what matches a run of opcodes; protocols 2 and 3 count their memo places in LONG_BINPUT."""
    if raw[1] >= _MEMOIZES:
        return _run_and_odd(b"")
    last = _last_place(raw)
    rules.budget.lend(_MEMO_PLACE * last)
    high, low = divmod(last >> 16, 256)
    below = b"|" + _ANY + _any_of(range(high)) if high else b""
    put = b"|r" + 2 * _ANY + b"(?:" + _any_of(range(low + 1)) + _any_of(range(high, high + 1)) + below + b")"
    return _run_and_odd(put)


def _run_and_odd(more: bytes) -> re.Pattern[bytes]:
    return re.compile(b"(%s)(%s)?" % (_RUN.replace(b"%s", more), _ODD), re.DOTALL)


def _last_place(raw: bytes) -> int:
    """Return the highest memo index that a pickle may put something at."""
    return len(raw) // _PUT_BYTES + 256 | 0xFFFF


def _any_of(values: range) -> bytes:
    return b"[" + b"".join(re.escape(bytes([value])) for value in values if value not in _SPECIAL) + b"]"


def pairs(flat: list[object]) -> Iterator[tuple[object, object]]:
    """Yield the keys and values of a dictionary that `TamePickle` turned into a flat list, in the saved order.

    Raises:
        ValueError: A key has no value.

    >>> list(pairs(["a", 1, ("b", 2), "c", 3]))
    [('a', 1), ('b', 2), ('c', 3)]
    """
    items = iter(flat)
    for key in items:
        if isinstance(key, tuple):
            single, value = key
            yield single, value
        else:
            try:
                yield key, next(items)
            except StopIteration:
                raise ValueError("a dictionary has a key without a value") from None


def _skip(raw: bytes, start: int, rules: Rules) -> tuple[int, bytes]:
    """Return where the opcode at ``start`` ends, if it may stand there, and what stands for it."""
    code, after = raw[start : start + 1], start + 1
    if code == _SETITEM:
        return after, _PAIR
    if code == _FRAME and int.from_bytes(raw[after : after + 8], "little") <= len(raw) - after - 8:
        return after + 8, b""
    stop = _skip_whole(raw, start, rules)
    return stop, raw[start:stop]


def _skip_whole(raw: bytes, start: int, rules: Rules) -> int:
    """Return where the opcode ends that is handed on as it is."""
    code, after = raw[start : start + 1], start + 1
    if width := _PREFIX_BYTES.get(code):
        return _skip_counted(raw, after, width, rules)
    if code == _LONG_BINPUT and (place := int.from_bytes(raw[after : after + 4], "little")) <= _last_place(raw):
        rules.budget.lend(_MEMO_PLACE * place if raw[1] >= _MEMOIZES else 0)
        if len(raw) >= after + 4:
            return after + 4
    if code == b"Q" and rules.persistent_ids:
        return after
    if code in {b"c", b"i"} and (name := _GLOBAL_NAME.match(raw, after)):
        rules.check_global(_text(name[1]), _text(name[2]))
        if code == b"c":
            return name.end()
    raise _refusal(raw, start, rules.where)


def _skip_counted(raw: bytes, start: int, width: int, rules: Rules) -> int:
    length = int.from_bytes(raw[start : start + width], "little")
    stop = start + width + length
    if stop > len(raw):
        raise CorruptFile(
            f"{rules.where}: byte {start - 1}: a value of {length} bytes, where the pickle has {len(raw)} in all"
        )
    if raw[start - 1 : start] == _LONG1 and length > _LONGEST_INTEGER:
        raise CorruptFile(f"{rules.where}: byte {start - 1}: an integer of {length} bytes")
    rules.budget.lend(2 * length if length > _MOST_IN_FRAME else 0)  # the frame, and the piece that it is made of
    rules.budget.spend(length if raw[start + width : stop].isascii() else _WIDE_TEXT + _WIDE * length)
    return stop


def _refusal(raw: bytes, position: int, where: str) -> SourceError:
    code = raw[position : position + 1]
    if name := _REFUSED.get(code):
        return UnsafePickle(f"{where}: byte {position}: opcode {name}, which no writer of such a file uses")
    if not code or code in _FIXED:
        return CorruptFile(f"{where}: cut off: the pickle ends at byte {len(raw)} without its last opcode")
    return CorruptFile(f"{where}: byte {position}: {code!r} is no opcode, or what follows it is damaged")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")
