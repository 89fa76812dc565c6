"""What reading a hostile ``.metadata`` takes of memory, as the operating system counts it.

Each pickle is read in a process of its own whose address space may grow by so much and no more. Python's own tracing of
memory is no witness here: it does not see how an allocator rounds up, and what it cannot give back.
"""

import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from hfdcp_core.errors import SourceError

READER = """
import json, os, resource, sys
from hfdcp_core.distcp_file import read_metadata
from hfdcp_core.errors import SourceError

raw = open(sys.argv[1], "rb").read()
try:
    read_metadata(b"\\x80\\x04N.", path="warm")
except SourceError:
    pass
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * os.sysconf("SC_PAGE_SIZE") + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    read_metadata(raw, path="here")
except SourceError as refused:
    print(json.dumps([type(refused).__name__, str(refused)]))
"""
SIZE = 2 << 20
METADATA = "torch.distributed.checkpoint.metadata"


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def record(name: str, *fields: bytes, module: str = METADATA) -> bytes:
    return f"c{module}\n{name}\n".encode() + b")\x81}(" + b"".join(fields) + b"ub"


def filled(start: bytes, unit: bytes, stop: bytes) -> bytes:
    return b"\x80\x04" + start + unit * (SIZE // len(unit)) + stop + b"."


def metadata(entries: bytes, *more: bytes, stored: bytes = b"}", planned: bytes = b"N") -> bytes:
    """A pickle of a whole Metadata, with values in front that ``entries`` may refer to by their memo places."""
    known = b"".join([*(text("note") + value + b"\x94" for value in more)])
    tables = text("state_dict_metadata") + entries + text("storage_data") + stored + text("planner_data") + planned
    return b"\x80\x04" + record("Metadata", known, tables) + b"."


def short(number: int) -> bytes:
    name = f"{number:x}".encode()
    return b"\x8c" + bytes([len(name)]) + name


def table(value: bytes, count: int) -> bytes:
    return b"}(" + b"".join(short(number) + value for number in range(count)) + b"u"


BYTES = record("BytesStorageMetadata")
NOTHING = b"]"
PROPERTIES = b"c" + METADATA.encode() + b"\nTensorProperties\n)\x81(ctorch\nfloat32\ntb"
TENSOR = record("TensorStorageMetadata", text("properties"), PROPERTIES, text("size"), b"K\1\x85", text("chunks"), b"]")
INDEX = record("MetadataIndex", text("fqn"), text("b"))
STORED = record(
    "_StorageInfo",
    *(text("relative_path"), text("f"), text("offset"), b"K\1", text("length"), b"K\1"),
    module="torch.distributed.checkpoint.filesystem",
)
LAYOUT = b"ctorch.serialization\n_get_layout\n"
ORDERED = b"ccollections\nOrderedDict\n"
TOO_MUCH = r"bytes would take more than \d+ bytes of memory, as no writer's do"
EITHER = f"{TOO_MUCH}|expected a Metadata"

BOMBS = {
    "lists in a tuple": (filled(b"(", b"]", b"t"), TOO_MUCH),
    "lists of one item": (filled(b"(", b"]Na", b"t"), TOO_MUCH),
    "lists of one item by groups": (filled(b"(", b"](Ne", b"t"), TOO_MUCH),
    "lists of six items": (filled(b"(", b"](NNNNNNe", b"t"), EITHER),
    "lists of numbers": (filled(b"(", b"]" + b"J\1\2\3\4a" * 4, b"t"), EITHER),
    "dictionaries of empty tuples": (filled(b"(", b"}(N)N)u", b"t"), EITHER),
    "dictionaries of one item": (filled(b"(", b"})Ns", b"t"), TOO_MUCH),
    "tuples in a tuple": (filled(b"(", b"N\x85", b"t"), TOO_MUCH),
    "tuples in tuples without end": (filled(b"N", b"\x85", b""), TOO_MUCH),
    "tuples that are remembered": (filled(b"(", b"N\x85\x94", b"t"), TOO_MUCH),
    "a list of remembered lists": (filled(b"](", b"]\x94", b"e"), TOO_MUCH),
    "marks": (filled(b"", b"(", b""), f"{TOO_MUCH}|unexpected MARK"),
    "groups in groups": (filled(b"", b"(N", b"t" * (SIZE // 2)), TOO_MUCH),
    "constants": (filled(b"(", b"\x88", b"t"), EITHER),
    "small numbers": (filled(b"(", b"K\1", b"t"), EITHER),
    "numbers": (filled(b"(", b"M\1\2", b"t"), EITHER),
    "floats": (filled(b"(", b"G12345678\x85", b"t"), EITHER),
    "long integers": (filled(b"(", b"\x8a\5abcd\1", b"t"), EITHER),
    "empty texts": (filled(b"(", b"\x8c\0", b"t"), TOO_MUCH),
    "texts of two letters": (filled(b"(", b"\x8c\2ab", b"t"), EITHER),
    "texts of one wide letter": (filled(b"(", b"\x8c\4\xf0\x9f\x98\x80", b"t"), EITHER),
    "one long text with one wide letter": (
        b"\x80\x04" + text("a" * SIZE + "\N{GRINNING FACE}") + b".",
        EITHER,
    ),
    "bytes of one": (filled(b"(", b"C\1\xff", b"t"), EITHER),
    "one memo place again and again": (filled(b"N", b"\x94", b""), EITHER),
    "the last memo place there may be": (
        b"\x80\x02N" + b"r" + struct.pack("<I", SIZE // 6) + b"C\xff" + b"x" * SIZE + b".",
        "is no opcode|damaged",
    ),
    "records": (filled(b"c" + METADATA.encode() + b"\nMetadataIndex\n\x94(", b"h\0)\x81", b"t"), TOO_MUCH),
    "records with states": (
        filled(b"c" + METADATA.encode() + b"\nMetadataIndex\n\x94(", b"h\0)\x81}(NNNNNNub", b"t"),
        EITHER,
    ),
    "records by calls": (
        filled(b"c" + METADATA.encode() + b"\nMetadataIndex\n\x94(", b"h\0)R", b"t"),
        "a record is made without a call",
    ),
    "dictionaries by calls": (filled(ORDERED + b"\x94(", b"h\0)R", b"t"), TOO_MUCH),
    "a call that copies its arguments": (
        b"\x80\x04" + LAYOUT + b"\x94(" + b"N" * (SIZE // 8) + b"t\x94" + b"h\0h\1R" * (SIZE // 8) + b".",
        "a call with 262144 arguments",
    ),
    "entries that are no tensors": (metadata(table(b"h\0", SIZE // 8), BYTES), TOO_MUCH),
    "entries that are empty tensors": (metadata(table(b"h\0", SIZE // 8), TENSOR), TOO_MUCH),
    "one item again and again": (
        metadata(b"}" + text("b") + BYTES + b"s", INDEX, STORED, stored=b"}(" + b"h\0h\1" * (SIZE // 4) + b"u"),
        "two items of it",
    ),
    "names with one nesting each": (
        metadata(b"}", planned=b"}(" + b"".join(short(n) + short(n) + b"\x85" for n in range(SIZE // 14)) + b"u"),
        TOO_MUCH,
    ),
    "a nesting that names a long text again and again": (
        metadata(
            b"}",
            text("x" * SIZE),
            planned=b"}" + text("a") + b"(" + b"h\0" * (SIZE // 4) + b"ts",
        ),
        "spells another name",
    ),
    "a path of many parts": (
        metadata(
            b"}" + text("b") + BYTES + b"s",
            INDEX,
            stored=b"}h\0" + STORED.replace(text("f"), text("ab/" * (SIZE // 3))) + b"s",
        ),
        "is no path inside the checkpoint",
    ),
}


@pytest.mark.parametrize(("raw", "message"), BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused_in_sixteen_times_its_size_and_little_more(raw: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(raw)
    most = (32 << 20) + 16 * len(raw)
    child = subprocess.run(
        [sys.executable, "-c", READER, path, str(most)], capture_output=True, text=True, timeout=300, check=True
    )
    kind, told = json.loads(child.stdout)
    assert kind in {error.__name__ for error in SourceError.__subclasses__()}
    assert told.startswith("here: ")
    assert "MemoryError" not in told
    assert re.search(message, told)
