import copy
import pickle
import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfdcp_core.distcp_scan import Budget, Rules, TamePickle, pairs
from hfdcp_core.errors import CorruptFile, UnsafePickle

ATOMS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**64)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300)
)
VALUES = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=20,
)


def allow(module: str, name: str) -> object:
    return (module, name)


def refuse(module: str, name: str) -> object:
    raise UnsafePickle(f"{module}.{name}")


def disarm(
    raw: bytes,
    check: Callable[[str, str], object] = allow,
    *,
    persistent_ids: bool = False,
    budget: Budget | None = None,
) -> bytes:
    """All that an unpickler would read."""
    rules = Rules("here", check, budget or Budget("here", len(raw)), persistent_ids)
    return TamePickle(raw, rules).read(10 * len(raw) + 100)


def load(raw: bytes) -> object:
    return pickle.Unpickler(TamePickle(raw, Rules("here", allow, Budget("here", len(raw))))).load()


def flat(value: object) -> object:
    """What is loaded for a value: each dictionary as a flat list, a lone item of which is a pair."""
    if isinstance(value, dict):
        items = [(key, flat(item)) for key, item in value.items()]
        return items if len(items) == 1 else [part for item in items for part in item]
    if isinstance(value, list):
        return [flat(item) for item in value]
    return tuple(map(flat, value)) if isinstance(value, tuple) else value


@given(VALUES, st.integers(3, 5))  # in protocol 2, bytes are written as a call
def test_everything_but_dictionaries_is_loaded_as_it_was_saved(value: object, protocol: int) -> None:
    raw = pickle.dumps(value, protocol)
    assert load(raw) == flat(value)


@given(st.dictionaries(st.text(max_size=5), st.integers(0, 2**64), max_size=30), st.integers(2, 5))
def test_a_dictionary_is_a_flat_list_of_its_items_in_their_order(value: dict[str, int], protocol: int) -> None:
    loaded = load(pickle.dumps(value, protocol))
    assert isinstance(loaded, list)
    assert list(pairs(loaded)) == list(value.items())


@pytest.mark.parametrize("size", [999, 1000, 1001, 1002, 2500])
@pytest.mark.parametrize("protocol", [2, 4])
def test_dictionaries_that_the_pickler_writes_in_batches_are_whole(size: int, protocol: int) -> None:
    value = {f"name {number}": (number, f"value {number}") for number in range(size)}
    loaded = load(pickle.dumps(value, protocol))
    assert isinstance(loaded, list)
    assert list(pairs(loaded)) == list(value.items())


def test_a_large_pickle_is_handed_on_in_frames_of_our_own_that_do_not_cut_opcodes() -> None:
    value = [(f"text {number}" * number, number, 2**40 + number, -number / 3) for number in range(2000)]
    raw = pickle.dumps(value, 4)
    assert load(raw) == value
    assert disarm(raw).count(b"\x95") > 100


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_arguments_that_look_like_opcodes_stay_as_they_are(protocol: int) -> None:
    numbers = [*range(0x10000), *(byte << shift | 1 << 30 for byte in b"}u(etR.s" for shift in (0, 8, 16))]
    floats = [struct.unpack(">d", bytes([63, *[byte] * 7]))[0] for byte in b"}u(etR.s"]
    value = (numbers, floats, [2**39 + number for number in numbers], [chr(number) * 3 for number in range(0x800)])
    assert load(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", [2, 4])
def test_many_memo_places_are_counted(protocol: int) -> None:
    value = [(number, (number,)) for number in range(150_000)]
    value += [value[7], value[140_000]]
    loaded = load(pickle.dumps(value, protocol))
    assert loaded == value
    assert isinstance(loaded, list)
    assert loaded[-1] is loaded[140_000]


@pytest.mark.parametrize(
    "unit",
    [
        b"\x8a\5abcd\1",
        b"\x8a\7}u(et\1\1",
        b"K}",
        b"M(u",
        b"J}u(e",
        b"Gtttttttt",
        b"\x8c\4text",
        b"X\3\0\0\0uet",
        b"C\2\xff}",
    ],
    ids=repr,
)
def test_an_opcode_may_reach_over_the_end_of_what_is_looked_at_at_once(unit: bytes) -> None:
    for shift in range(len(unit)):
        raw = b"\x80\x04(" + b"N" * shift + unit * (200_000 // len(unit)) + b"t."
        assert load(raw) == pickle.loads(raw)


def test_a_memo_place_that_no_writer_comes_to_is_refused() -> None:
    for protocol in (2, 4):
        start = bytes([0x80, protocol])
        assert disarm(start + b"Nr\xff\xff\0\0.").endswith(b"Nr\xff\xff\0\0.")
        with pytest.raises(CorruptFile, match="byte 3: b'r' is no opcode, or what follows it is damaged"):
            disarm(start + b"Nr\0\0\1\0.")


def test_a_global_that_an_opcode_spells_out_is_checked_before_anything_is_loaded() -> None:
    with pytest.raises(UnsafePickle, match=r"os.system"):
        disarm(b"\x80\x02cos\nsystem\n.", refuse)


def test_persistent_ids_are_refused_where_none_are_expected() -> None:
    assert disarm(b"\x80\x02NQ.", persistent_ids=True).endswith(b"NQ.")
    with pytest.raises(UnsafePickle, match="here: byte 3: opcode BINPERSID, which no writer of such a file uses"):
        disarm(b"\x80\x02NQ.")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not a pickle of protocol 2 to 5: it begins with b''"),
        (b"\x80", "not a pickle"),
        (b"\x80\x01N.", "not a pickle"),
        (b"N.", "not a pickle"),
        (b"\x80\x02", "cut off: the pickle ends at byte 2 without its last opcode"),
        (b"\x80\x02K", "cut off"),
        (b"\x80\x02J\1\2\3", "cut off"),
        (b"\x80\x02X\5\0\0\0abcd", "byte 2: a value of 5 bytes, where the pickle has 11 in all"),
        (b"\x80\x02Nr\0\0", "is no opcode, or what follows it is damaged"),
        (b"\x80\x02cos", "is no opcode, or what follows it is damaged"),
        (b"\x80\x02N.N.", "2 bytes behind the end of the pickle"),
        (b"\x80\x02\x8a\x0a0123456789.", "an integer of 10 bytes"),
    ],
    ids=repr,
)
def test_a_pickle_is_refused_that_is(raw: bytes, message: str) -> None:
    with pytest.raises(CorruptFile, match=message):
        disarm(raw)


def test_a_key_without_a_value_is_an_error() -> None:
    with pytest.raises(ValueError, match="a key without a value"):
        list(pairs(["a", 1, "b"]))


UNITS = {
    "lists": b"]", "lists of one": b"]Na", "tuples": b"N\x85", "pairs": b"NN\x86", "groups": b"(Nt", "marks": b"(",
    "constants": b"N", "numbers": b"M\1\2", "short texts": b"\x8c\1a",
    "wide texts": b"X\4\0\0\0\xf0\x9f\x98\x80", "short bytes": b"C\1a", "dictionaries": b"})Ns",
}  # fmt: skip


@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
def test_a_pickle_that_would_make_far_more_than_a_writers_is_refused_before_it_does(unit: bytes) -> None:
    raw = b"\x80\x04" + unit * (3_000_000 // len(unit)) + b"."
    file = TamePickle(raw, Rules("here", allow, Budget("here", len(raw) // 4)))
    assert len(file.read(1 << 16)) == 1 << 16
    with pytest.raises(CorruptFile, match=r"here: its \d+ bytes would take more than \d+ bytes of memory"):
        file.read(len(raw) * 2)


@pytest.mark.parametrize("lent", [b"N" * 100 + b"(" * 100, b"(" + b"N" * 100 + b"t"], ids=["open", "closed"])
def test_places_on_the_stack_are_paid_until_the_pickle_is_loaded(lent: bytes) -> None:
    one, two = Budget("here", 10), Budget("here", 10)
    disarm(b"\x80\x04" + lent + b"\x94" * 50 + b".", budget=one)
    before = left(one)
    one.take_back()
    assert left(one) - before == (100 * 9 + 100 * 24 if lent.startswith(b"N") else 9) + 50 * 16
    two.take_back()
    assert left(two) == 15 * 10 + (24 << 20)


def left(budget: Budget) -> int:
    """How much can still be spent, by trying."""
    low, high = 0, 1 << 40
    while high - low > 1:
        middle = (low + high) // 2
        attempt = copy.copy(budget)
        try:
            attempt.spend(middle)
            low = middle
        except CorruptFile:
            high = middle
    return low


def test_a_pickle_has_no_lines_outside_of_its_frames() -> None:
    assert TamePickle(b"", Rules("here", allow, Budget("here", 0))).readline() == b""
