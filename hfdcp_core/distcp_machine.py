r"""Walks over the opcodes of a pickle and makes plain values of them; it cannot look a name up and cannot call.

Values are made as the pickle says, on a stack, with a memo for what is shared. Three names are known, by what they
write: ``collections.OrderedDict``, and the ``_codecs.encode`` and ``bytes`` by which protocol 2 writes bytes. Any other
name, and all that is asked of it, leaves a stand-in on the stack and a note of the name.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hfdcp_core.distcp_records import named

TENSORS = "holds tensors that are not converted"
"""What is said of an object with tensors inside: they are in no file of the output."""
_MOST_DIGITS = 255
"""Bytes of the longest integer."""
_ORDERED = ("collections", "OrderedDict")
_ENCODE = ("_codecs", "encode")
_BYTES = ("builtins", "bytes")
_PLAIN = {_ORDERED, _ENCODE, _BYTES}


class NotPlainError(Exception):
    """Ends the walk over a pickle: it holds something else than plain values."""


class DamagedError(Exception):
    """Ends the walk over a pickle: it is none."""


@dataclass(frozen=True, slots=True)
class Name:
    """A name in a pickle; nothing is known of what it stands for, and nobody asks."""

    module: str
    name: str


class Items(list[tuple[object, object]]):
    """A dictionary as a list of its items, so that no key is ever hashed before it is known to be text."""

    __slots__ = ()


class _Mark:
    """Where a group of values begins on the stack."""

    __slots__ = ()


_MARK = _Mark()
_UNKNOWN = object()
"""Stands for whatever an unknown name would have made."""


_BINFLOAT = struct.Struct(">d")
_LENGTHS = {b"\x8c": 1, b"X": 4, b"\x8d": 8, b"C": 1, b"B": 4, b"\x8e": 8, b"\x8a": 1, b"\x8b": 4}
"""Opcodes of text, bytes and long integers, and how many bytes their length takes."""
_TEXTS, _BYTESTRINGS = (b"\x8c", b"X", b"\x8d"), (b"C", b"B", b"\x8e")
_FIXED = {b"K": (1, False), b"M": (2, False), b"J": (4, True)}
_CONSTANTS: Mapping[bytes, object] = {b"N": None, b"\x88": True, b"\x89": False, b")": (), b"(": _MARK}
_TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}
_MEMO_PUTS = {b"q": 1, b"r": 4}
_MEMO_GETS = {b"h": 1, b"j": 4}
_SKIPPED = {b"\x80": 1, b"\x95": 8}
"""PROTO and FRAME say nothing about the value."""
_OTHERS = {
    b"0": "POP", b"1": "POP_MARK", b"2": "DUP", b"F": "FLOAT", b"I": "INT", b"L": "LONG", b"S": "STRING",
    b"T": "BINSTRING", b"U": "SHORT_BINSTRING", b"V": "UNICODE", b"d": "DICT", b"l": "LIST", b"g": "GET", b"p": "PUT",
    b"i": "INST", b"o": "OBJ", b"\x82": "EXT1", b"\x83": "EXT2", b"\x84": "EXT4", b"\x8f": "EMPTY_SET",
    b"\x90": "ADDITEMS", b"\x91": "FROZENSET", b"\x92": "NEWOBJ_EX", b"\x96": "BYTEARRAY8", b"\x97": "NEXT_BUFFER",
    b"\x98": "READONLY_BUFFER",
}  # fmt: skip
"""Opcodes that make what is no plain value, or that nobody has used for one since Python 2."""


class Machine:
    """Walks over the opcodes of a pickle, with a stack of plain values and stand-ins."""

    def __init__(self, raw: bytes) -> None:
        self.problem = ""
        """The first thing met that is no plain value; tensors go before all others."""
        self.position = 0
        self._raw = raw
        self._stack: list[object] = []
        self._memo: dict[int, object] = {}
        self._steps: Mapping[bytes, Callable[[], None]] = {
            b"]": lambda: self._stack.append([]),
            b"}": lambda: self._stack.append(Items()),
            b"a": lambda: self._extend([self._pop()]),
            b"e": lambda: self._extend(self._group()),
            b"s": lambda: self._update([self._pop(), self._pop()][::-1]),
            b"u": lambda: self._update(self._group()),
            b"t": lambda: self._stack.append(tuple(self._group())),
            b"\x94": lambda: self._remember(len(self._memo)),
            b"c": self._global,
            b"\x93": self._stack_global,
            b"R": self._call,
            b"\x81": self._call,
            b"b": self._build,
            b"Q": self._persistent,
            b"P": self._persistent_line,
        }

    def run(self) -> object:
        """Return the value that is left when the pickle stops."""
        while (code := self._take(1)) != b".":
            self._step(code)
        if self.position != len(self._raw) or len(self._stack) != 1:
            raise DamagedError("it does not end with one value")
        return self._pop()

    def _step(self, code: bytes) -> None:
        if code in _LENGTHS:
            self._stack.append(self._counted(code))
        elif code in _CONSTANTS:
            self._stack.append(_CONSTANTS[code])
        elif code in _FIXED:
            width, signed = _FIXED[code]
            self._stack.append(int.from_bytes(self._take(width), "little", signed=signed))
        elif code == b"G":
            self._stack.append(_BINFLOAT.unpack(self._take(8))[0])
        elif code in _TUPLES:
            self._stack.append(tuple([self._pop() for _ in range(_TUPLES[code])][::-1]))
        elif code in _MEMO_PUTS:
            self._remember(self._number(_MEMO_PUTS[code]))
        elif code in _MEMO_GETS:
            self._recall(self._number(_MEMO_GETS[code]))
        elif code in _SKIPPED:
            self._take(_SKIPPED[code])
        else:
            self._rarer(code)

    def _rarer(self, code: bytes) -> None:
        if code in _OTHERS:
            self._note(f"is pickled with the opcode {_OTHERS[code]}, which no plain value needs")
            raise NotPlainError
        if code not in self._steps:
            raise DamagedError(f"{code!r} is no opcode")
        self._steps[code]()

    # ---- reading ----

    def _take(self, count: int) -> bytes:
        start, self.position = self.position, self.position + count
        if self.position > len(self._raw):
            raise DamagedError("cut off")
        return self._raw[start : self.position]

    def _number(self, width: int) -> int:
        return int.from_bytes(self._take(width), "little")

    def _counted(self, code: bytes) -> object:
        data = self._take(self._number(_LENGTHS[code]))
        if code in _TEXTS:
            return data.decode("utf-8", "surrogatepass")
        if code in _BYTESTRINGS:
            return data
        if len(data) > _MOST_DIGITS:
            self._note(f"holds an integer of {len(data)} bytes")
            raise NotPlainError
        return int.from_bytes(data, "little", signed=True)

    def _line(self) -> str:
        stop = self._raw.find(b"\n", self.position)
        if stop < 0:
            raise DamagedError("cut off")
        line = self._raw[self.position : stop]
        self.position = stop + 1
        return line.decode("utf-8", "backslashreplace")

    # ---- the stack ----

    def _pop(self) -> object:
        if self._stack and self._stack[-1] is _MARK:
            raise DamagedError("a group of values is left open")
        return self._stack.pop()

    def _group(self) -> list[object]:
        """Return the values from the last mark on."""
        values: list[object] = []
        while (value := self._stack.pop()) is not _MARK:
            values.append(value)
        return values[::-1]

    def _extend(self, values: list[object]) -> None:
        """Add to the list on the top of the stack; what a stand-in would be given is dropped."""
        top = self._stack[-1]
        if type(top) is list:
            top.extend(values)
        elif top is not _UNKNOWN:
            raise DamagedError("values for what is no list")

    def _update(self, values: list[object]) -> None:
        """Add keys and values to the dictionary on the top of the stack."""
        top = self._stack[-1]
        if len(values) % 2:
            raise DamagedError("a key without a value")
        if isinstance(top, Items):
            top.extend(zip(values[::2], values[1::2], strict=True))
        elif top is not _UNKNOWN:
            raise DamagedError("keys and values for what is no dictionary")

    def _remember(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def _recall(self, number: int) -> None:
        if number not in self._memo:
            raise DamagedError(f"nothing was remembered as {number}")
        self._stack.append(self._memo[number])

    # ---- names and what is asked of them ----

    def _note(self, problem: str) -> None:
        if problem == TENSORS or not self.problem:
            self.problem = problem

    def _global(self) -> None:
        module = self._line()
        self._name(module, self._line())

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if not (isinstance(module, str) and isinstance(name, str)):
            raise DamagedError("a name that is no text")
        self._name(module, name)

    def _name(self, module: str, name: str) -> None:
        module = "builtins" if module == "__builtin__" else module  # Python 2's name, which protocol 2 keeps
        if (module, name) in _PLAIN:
            self._stack.append(Name(module, name))
        else:
            self._note(f"holds {named(name)[1:-1]} of {named(module)[1:-1]}")
            self._stack.append(_UNKNOWN)

    def _call(self) -> None:
        """Do what one of the three known names would do; anything else was noted when it was named."""
        arguments, called = self._pop(), self._pop()
        match called, arguments:
            case Name("collections", "OrderedDict"), ():
                self._stack.append(Items())
            case Name("_codecs", "encode"), (str(text), "latin1"):
                self._stack.append(_latin1(text))
            case Name("builtins", "bytes"), ():
                self._stack.append(b"")
            case Name(module, name), _:
                self._note(f"holds {name} of {module}, called in an unusual way")
                self._stack.append(_UNKNOWN)
            case _:
                if called is not _UNKNOWN:
                    raise DamagedError("a call of what has no name")
                self._stack.append(_UNKNOWN)

    def _build(self) -> None:
        self._pop()
        if self._stack[-1] is not _UNKNOWN:
            self._note("holds a container with attributes of its own")

    def _persistent(self) -> None:
        self._pop()
        self._note(TENSORS)
        self._stack.append(_UNKNOWN)

    def _persistent_line(self) -> None:
        self._line()
        self._note(TENSORS)
        self._stack.append(_UNKNOWN)


def _latin1(text: str) -> bytes:
    """Return the bytes that protocol 2 wrote as text."""
    try:
        return codecs.encode(text, "latin1")
    except UnicodeEncodeError:
        raise DamagedError("bytes that are none") from None
