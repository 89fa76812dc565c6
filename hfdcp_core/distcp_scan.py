r"""Makes a pickle harmless before the unpickler sees it: a scan of its opcodes that bounds what they can cost.

`hfdcp_core.distcp_file` lets an unpickler resolve only the few globals that writers of DCP use. That stops code from
being called, but a pickle has other weapons: a length prefix of an exabyte, a memo index that makes the unpickler
allocate gigabytes, and dictionary keys whose hash takes for ever (nested tuples that share their parts) or overflows
the C stack. So every pickle is first cut into opcodes, without executing any:

1. An opcode that no writer of DCP uses is refused by name: sets, extension codes, decimal numbers, `INST` and so on.
2. A length prefix must fit into the bytes that are left, and a memo index below the size of the pickle.
3. Dictionaries become flat lists (``}`` → ``]``, ``u`` → ``e``, ``s`` → ``\x86a``): nothing is hashed while the pickle
   is loaded, and no dictionary exists that a BUILD could use to change attributes. `pairs` reads such lists.
4. The writer's frames are dropped and all is put into one, so that the unpickler copies its input once.

5. Opcodes that make objects are counted: a pickle that would make far more of them than a writer's takes is refused.

What is left costs time and memory in proportion to the pickle's size. Opcodes without a length prefix are matched in
runs by one regular expression, so that Python code runs only for the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hfdcp_core.errors import CorruptFile, SourceError, UnsafePickle

_RUN = re.compile(
    rb"(?:[()N\x88\x89\]aet\x85\x86\x87\x94\x93R\x81b]++|[Khq].|M..|[Jj]....|G........)*+",
    re.DOTALL,
)
"""Opcodes of fixed length that need no look: constants, lists, tuples, memo, calls (the unpickler checks globals)."""
_FIXED = b"()N\x88\x89]aet\x85\x86\x87\x94\x93R\x81bKhqMJjG"
_REFUSED = {
    b"0": "POP", b"1": "POP_MARK", b"2": "DUP", b"F": "FLOAT", b"I": "INT", b"L": "LONG", b"S": "STRING",
    b"T": "BINSTRING", b"U": "SHORT_BINSTRING", b"V": "UNICODE", b"d": "DICT", b"l": "LIST", b"g": "GET", b"p": "PUT",
    b"P": "PERSID", b"Q": "BINPERSID", b"i": "INST", b"o": "OBJ", b"\x80": "PROTO", b"\x82": "EXT1", b"\x83": "EXT2",
    b"\x84": "EXT4", b"\x8b": "LONG4", b"\x8f": "EMPTY_SET", b"\x90": "ADDITEMS", b"\x91": "FROZENSET",
    b"\x92": "NEWOBJ_EX", b"\x96": "BYTEARRAY8", b"\x97": "NEXT_BUFFER", b"\x98": "READONLY_BUFFER",
}  # fmt: skip
_PREFIX_BYTES = {b"\x8c": 1, b"X": 4, b"\x8d": 8, b"C": 1, b"B": 4, b"\x8e": 8, b"\x8a": 1}
"""Opcodes of strings, bytes and long integers, and how many bytes their length takes."""
_EMPTY_DICT, _SETITEMS, _STOP, _LONG1 = b"}u.\x8a"
_EMPTY_LIST, _APPENDS = b"]e"
_REPLACED = {ord("s"): b"\x86a", 0x95: b""}
"""What stands for a SETITEM (TUPLE2, APPEND) and for a FRAME."""
_START = b"\x80\x04\x95"
"""PROTO 4, FRAME: how every pickle begins that the unpickler sees."""
_GLOBAL_NAME = re.compile(rb"([^\n]{1,300})\n([^\n]{1,300})\n")
_LONGEST_INTEGER = 9
"""Bytes of the longest integer that any count of bytes or elements needs: 64 bits and a sign."""
_PROTOCOLS = range(2, 6)


_OBJECT_BYTES = {
    b"]": 136, b"}": 136, b"\x81": 136, b"(": 72, b"\x85": 64, b"\x86": 72, b"\x87": 80, b")R": 72, b"\x8c": 80,
    b"\x94": 24, b"N": 18, b"\x88": 18, b"\x89": 18, b")": 18,
}  # fmt: skip
"""Memory that an opcode takes at most: lists with a first item, tuples, results of calls, short texts, memo
places, and constants for their places on the stack and in a list.

The bytes are counted wherever they stand, in names too, which is more than there are, and quick.
"""
_MOST_TIMES, _MOST_BESIDES = 18, 48 << 20
"""Objects may take so many times the pickle's size, and so much besides. Writers' pickles come to 13 to 18 times."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What a pickle may do, beyond the opcodes that are always allowed."""

    where: str
    """Which pickle it is, for messages."""
    check_global: Callable[[str, str], object]
    """Called with module and name of every global that an opcode spells out; raises for one that is refused."""
    persistent_ids: bool = False
    """Whether it may name persistent ids, as the pickle in a ``torch.save`` archive does for its storages."""


def disarm(raw: bytes, rules: Rules) -> bytes:
    r"""Return the same pickle, its dictionaries turned into flat lists, after a look at every opcode.

    Raises:
        CorruptFile: It is cut off, has bytes behind its end, or is no pickle of protocol 2 to 5.
        UnsafePickle: It uses an opcode, or spells out a global, that no writer of DCP uses.

    >>> disarm(b"\x80\x04}\x8c\x01aK\x01s.", Rules("here", lambda module, name: None))[11:]
    b']\x8c\x01aK\x01\x86a.'
    """
    if len(raw) < 2 or raw[0] != 0x80 or raw[1] not in _PROTOCOLS:
        raise CorruptFile(f"{rules.where}: not a pickle of protocol 2 to 5: it begins with {raw[:8]!r}")
    objects = sum(size * raw.count(code) for code, size in _OBJECT_BYTES.items())
    if objects > _MOST_TIMES * len(raw) + _MOST_BESIDES:
        raise CorruptFile(f"{rules.where}: {len(raw)} bytes that would make objects of {objects}, as no writer's do")
    tame, position = bytearray(raw), 2
    out, copied = bytearray(), 2
    while True:
        run = _RUN.match(raw, position)
        assert run is not None  # it matches the empty run, too
        position = run.end()
        code = raw[position] if position < len(raw) else None
        if code == _EMPTY_DICT:
            tame[position] = _EMPTY_LIST
            position += 1
        elif code == _SETITEMS:
            tame[position] = _APPENDS
            position += 1
        elif code == _STOP:
            break
        else:
            start, position = position, _skip(raw, position, rules)
            if code in _REPLACED:
                out += memoryview(tame)[copied:start]
                out += _REPLACED[code]
                copied = position
    if position + 1 != len(raw):
        raise CorruptFile(f"{rules.where}: {len(raw) - position - 1} bytes behind the end of the pickle")
    out += memoryview(tame)[copied:]
    return b"".join([_START, len(out).to_bytes(8, "little"), out])


def pairs(flat: list[object]) -> Iterator[tuple[object, object]]:
    """Yield the keys and values of a dictionary that `disarm` turned into a flat list, in the saved order.

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


def _skip(raw: bytes, position: int, rules: Rules) -> int:
    """Return where the opcode at ``position`` ends, if it may stand there."""
    code, after = raw[position : position + 1], position + 1
    if width := _PREFIX_BYTES.get(code):
        return _skip_counted(raw, after, width, rules)
    if code == b"r" and int.from_bytes(raw[after : after + 4], "little") < len(raw) >= after + 4:
        return after + 4
    if code == b"\x95" and int.from_bytes(raw[after : after + 8], "little") <= len(raw) - after - 8:
        return after + 8
    if code == b"s" or (code == b"Q" and rules.persistent_ids):
        return after
    if code in {b"c", b"i"} and (name := _GLOBAL_NAME.match(raw, after)):
        rules.check_global(_text(name[1]), _text(name[2]))
        if code == b"c":
            return name.end()
    raise _refusal(raw, position, rules.where)


def _skip_counted(raw: bytes, start: int, width: int, rules: Rules) -> int:
    length = int.from_bytes(raw[start : start + width], "little")
    stop = start + width + length
    if stop > len(raw):
        raise CorruptFile(
            f"{rules.where}: byte {start - 1}: a value of {length} bytes, where the pickle has {len(raw)} in all"
        )
    if raw[start - 1] == _LONG1 and length > _LONGEST_INTEGER:
        raise CorruptFile(f"{rules.where}: byte {start - 1}: an integer of {length} bytes")
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
