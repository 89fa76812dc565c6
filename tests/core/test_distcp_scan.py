import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfdcp_core.distcp_scan import Rules, disarm, pairs
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
    assert pickle.loads(disarm(raw, Rules("x", allow))) == flat(value)


@given(st.dictionaries(st.text(max_size=5), st.integers(0, 2**64), max_size=30), st.integers(2, 5))
def test_a_dictionary_is_a_flat_list_of_its_items_in_their_order(value: dict[str, int], protocol: int) -> None:
    loaded = pickle.loads(disarm(pickle.dumps(value, protocol), Rules("x", allow)))
    assert list(pairs(loaded)) == list(value.items())


@pytest.mark.parametrize("size", [999, 1000, 1001, 1002, 2500])
@pytest.mark.parametrize("protocol", [2, 4])
def test_dictionaries_that_the_pickler_writes_in_batches_are_whole(size: int, protocol: int) -> None:
    value = {f"name {number}": (number, f"value {number}") for number in range(size)}
    loaded = pickle.loads(disarm(pickle.dumps(value, protocol), Rules("x", allow)))
    assert list(pairs(loaded)) == list(value.items())


def test_a_large_pickle_of_many_frames_is_put_into_one() -> None:
    value = [f"text {number}" * 100 for number in range(2000)]
    raw = pickle.dumps(value, 4)
    tame = disarm(raw, Rules("x", allow))
    assert raw.count(b"\x95") > tame.count(b"\x95") == 1
    assert pickle.loads(tame) == value


def test_a_global_that_an_opcode_spells_out_is_checked_before_anything_is_loaded() -> None:
    with pytest.raises(UnsafePickle, match=r"os.system"):
        disarm(b"\x80\x02cos\nsystem\n.", Rules("x", refuse))


def test_persistent_ids_are_refused_where_none_are_expected() -> None:
    assert disarm(b"\x80\x02NQ.", Rules("x", allow, persistent_ids=True)).endswith(b"NQ.")
    with pytest.raises(UnsafePickle, match="x: byte 3: opcode BINPERSID, which no writer of such a file uses"):
        disarm(b"\x80\x02NQ.", Rules("x", allow))


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
        disarm(raw, Rules("x", allow))


def test_a_key_without_a_value_is_an_error() -> None:
    with pytest.raises(ValueError, match="a key without a value"):
        list(pairs(["a", 1, "b"]))


@pytest.mark.parametrize("unit", [b"]", b"}Ns", b"]Na", b"N\x85", b"(Nt", b"\x94"], ids=repr)
def test_a_pickle_that_would_make_far_more_than_a_writers_is_refused_unread(unit: bytes) -> None:
    raw = b"\x80\x04N" + unit * (24 << 20 >> len(unit).bit_length() - 1) + b"."
    with pytest.raises(CorruptFile, match="would make objects of"):
        disarm(raw, Rules("here", lambda _module, _name: None))
