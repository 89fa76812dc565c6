"""The laws that every store keeps, whatever lies behind it."""

import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from hfdcp_core.errors import CorruptFile, SinkOccupied, StorageDenied, StorageNotFound, ValidationError
from hfdcp_core.fsspec_store import FsspecStore
from hfdcp_core.store import Listing, Sink, configure, open_store
from hfdcp_core.testing.faulty import faulty_store
from hfdcp_core.testing.gcs_server import BUCKET, GcsServer
from hfdcp_core.testing.servers import Server

CONTENT = bytes(range(256)) * 5

ESCAPES = ["", "/etc/passwd", "..", "../x", "a/../../x", "a/..", ".", "./a", "a//b", "a/", "a\0b"]

ODD_NAMES = ["a b", "[1]", "star*", "que?ry", "hash#", "100%", "plus+", "é", "-", "a'b\"", ".hidden", "x" * 200]


def names(store: Sink, folder: str = "") -> list[str]:
    return [file.path for file in store.list(folder).files]


class StoreLaws:
    """Inherited by a class for each kind of store, which says in a fixture how to make two of the same place."""

    @pytest.fixture
    def stores(self) -> tuple[Sink, Sink]:
        raise NotImplementedError

    @pytest.fixture
    def store(self, stores: tuple[Sink, Sink]) -> Sink:
        return stores[0]

    @pytest.fixture
    def other(self, stores: tuple[Sink, Sink]) -> Sink:
        return stores[1]

    def test_any_span_is_read_as_it_was_written(self, store: Sink) -> None:
        store.put("f", CONTENT)

        @settings(max_examples=30, deadline=None)
        @given(span=st.tuples(st.integers(0, len(CONTENT)), st.integers(0, len(CONTENT))).map(sorted))
        def law(span: list[int]) -> None:
            start, stop = span
            buffer = bytearray(stop - start)
            store.read_into("f", start, memoryview(buffer))
            assert bytes(buffer) == store.read("f", start, stop) == CONTENT[start:stop]

        law()

    def test_a_read_fills_only_the_buffer_it_is_given(self, store: Sink) -> None:
        store.put("f", CONTENT)
        buffer = bytearray(b"." * 12)
        store.read_into("f", 100, memoryview(buffer)[4:8])
        assert bytes(buffer) == b"...." + CONTENT[100:104] + b"...."

    def test_a_read_takes_a_buffer_of_any_item_size(self, store: Sink) -> None:
        store.put("f", CONTENT)
        buffer = bytearray(16)
        store.read_into("f", 8, memoryview(buffer).cast("q"))
        assert bytes(buffer) == CONTENT[8:24]

    @pytest.mark.parametrize(
        ("start", "stop"), [(len(CONTENT) - 1, len(CONTENT) + 1), (len(CONTENT), len(CONTENT) + 4), (9000, 9010)]
    )
    def test_a_read_beyond_the_end_names_file_bytes_and_end(self, store: Sink, start: int, stop: int) -> None:
        store.put("sub/f", CONTENT)
        with pytest.raises(CorruptFile, match=rf"sub/f: expected bytes \[{start}, {stop}\), found the end .* 1280"):
            store.read("sub/f", start, stop)

    def test_what_is_absent_is_not_found(self, store: Sink) -> None:
        store.put("there", b"x")
        store.put("folder/x", b"x")
        for path in ("absent", "absent/x", "folder/absent", "there/below"):
            with pytest.raises(StorageNotFound, match=r"absent|below"):
                store.read(path, 0, 1)
            with pytest.raises(StorageNotFound, match=r"absent|below"):
                store.stat(path)
        with pytest.raises(StorageNotFound, match="absent"):
            store.list("absent")
        with pytest.raises(StorageNotFound, match="folder"):
            store.stat("folder")

    def test_a_listing_shows_one_folder_sorted(self, store: Sink) -> None:
        for path in ("b", "a", "sub/y", "sub/x", "sub/deep/z"):
            store.put(path, path.encode())
        assert (names(store), store.list().folders) == (["a", "b"], ("sub",))
        assert (names(store, "sub"), store.list("sub").folders) == (["sub/x", "sub/y"], ("sub/deep",))
        assert [file.size for file in store.list("sub").files] == [5, 5]

    def test_a_listing_says_of_a_file_what_a_look_at_it_says(self, store: Sink) -> None:
        store.put("a", b"12")
        store.put("sub/b", b"345")
        assert store.list().files == (store.stat("a"),)
        assert store.list("sub").files == (store.stat("sub/b"),)

    def test_a_stamp_changes_when_the_content_does(self, store: Sink) -> None:
        store.put("f", b"old")
        before = store.stat("f")
        assert store.stat("f") == before
        store.put("f", b"new")
        assert store.stat("f") != before

    def test_replaced_content_is_seen_by_all(self, store: Sink, other: Sink) -> None:
        store.put("f", b"old!")
        assert store.read("f", 0, 4) == other.read("f", 0, 4) == b"old!"
        other.put("f", b"newer")
        assert store.read("f", 0, 5) == other.read("f", 0, 5) == b"newer"
        assert store.stat("f").size == store.list().files[0].size == 5

    def test_an_upload_shows_nothing_before_it_is_committed(self, store: Sink, other: Sink) -> None:
        store.put("there", b"x")
        upload = store.create("sub/f", 6)
        upload.write(memoryview(b"abc"))
        for reader in (store, other):
            with pytest.raises(StorageNotFound):
                reader.stat("sub/f")
            assert names(reader) == ["there"]
        upload.write(memoryview(b"def"))
        upload.commit()
        assert names(other, "sub") == ["sub/f"]
        assert other.read("sub/f", 0, 6) == b"abcdef"

    def test_an_upload_keeps_the_older_file_until_it_is_committed(self, store: Sink) -> None:
        store.put("f", b"old")
        upload = store.create("f", 5)
        upload.write(memoryview(b"newer"))
        assert store.read("f", 0, 3) == b"old"
        upload.commit()
        assert store.read("f", 0, 5) == b"newer"

    def test_an_aborted_upload_leaves_nothing(self, store: Sink, other: Sink) -> None:
        store.put("f", b"old")
        for path in ("f", "g"):
            upload = store.create(path, 4)
            upload.write(memoryview(b"ne"))
            upload.abort()
            upload.abort()
        del upload
        assert names(other) == ["f"]
        assert other.read("f", 0, 3) == b"old"

    @pytest.mark.parametrize("data", [b"", b"123", b"12345"], ids=["nothing", "too little", "too much"])
    def test_an_upload_of_another_size_than_announced_is_not_committed(self, store: Sink, data: bytes) -> None:
        store.put("there", b"x")
        upload = store.create("f", 4)
        upload.write(memoryview(data))
        with pytest.raises(ValidationError, match=f"f: 4 bytes were announced, {len(data)} were written"):
            upload.commit()
        upload.abort()
        assert names(store) == ["there"]

    def test_abort_after_commit_changes_nothing(self, store: Sink) -> None:
        upload = store.create("f", 1)
        upload.write(memoryview(b"x"))
        upload.commit()
        upload.abort()
        assert store.read("f", 0, 1) == b"x"

    def test_an_empty_file_is_a_file(self, store: Sink) -> None:
        store.put("empty", b"")
        assert store.stat("empty").size == 0
        assert store.read("empty", 0, 0) == b""

    def test_many_writes_of_any_item_size_make_one_file(self, store: Sink) -> None:
        upload = store.create("f", 26)
        for part in (b"0123456789", b"", b"abcdefgh"):
            upload.write(memoryview(part))
        upload.write(memoryview(bytearray(b"ABCDEFGH")).cast("q"))
        upload.commit()
        assert store.read("f", 0, 26) == b"0123456789abcdefghABCDEFGH"

    def test_delete_removes_one_file_and_may_be_repeated(self, store: Sink, other: Sink) -> None:
        store.put("keep", b"x")
        store.put("f", b"x")
        assert other.read("f", 0, 1) == b"x"
        store.delete("f")
        store.delete("f")
        assert names(other) == ["keep"]
        with pytest.raises(StorageNotFound):
            other.read("f", 0, 1)

    @pytest.mark.parametrize("path", ESCAPES, ids=repr)
    def test_a_path_that_leaves_the_store_is_refused(self, store: Sink, path: str) -> None:
        calls = [
            lambda: store.stat(path),
            lambda: store.read(path, 0, 1),
            lambda: store.create(path, 1),
            lambda: store.put(path, b"x"),
            lambda: store.delete(path),
            lambda: store.hold(path, "note").__enter__(),
            *([lambda: store.list(path)] if path else []),
        ]
        for call in calls:
            with pytest.raises(StorageDenied, match="is refused"):
                call()

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_a_name_means_just_itself(self, store: Sink, name: str) -> None:
        store.put("a", b"decoy")
        store.put(f"sub/{name}", b"content")
        assert names(store, "sub") == [f"sub/{name}"]
        assert store.stat(f"sub/{name}").size == 7
        assert store.read(f"sub/{name}", 1, 7) == b"ontent"
        store.delete(f"sub/{name}")
        assert names(store) == ["a"]

    def test_sweep_removes_what_dead_writers_left_and_spares_the_living(self, store: Sink, other: Sink) -> None:
        for path in ("keep", ".hfdcp/keep"):
            store.put(path, b"x")
        living = store.create("f", 1)
        other.sweep()
        store.sweep()
        living.write(memoryview(b"x"))
        living.commit()
        assert names(store) == ["f", "keep"]
        assert names(store, ".hfdcp") == [".hfdcp/keep"]

    def test_sweep_of_a_place_that_is_not_there_does_nothing(self, store: Sink) -> None:
        store.sweep()
        with pytest.raises(StorageNotFound):
            store.list()

    def test_a_second_holder_is_told_who_holds(self, store: Sink, other: Sink) -> None:
        with store.hold(".hfdcp/lock", "publish of a model"):
            for second in (store, other):
                with pytest.raises(SinkOccupied, match=r"lock is held by process \d+ on .*publish of a model"):
                    second.hold(".hfdcp/lock", "another").__enter__()
            with other.hold(".hfdcp/other-lock", "another"):
                pass
        with other.hold(".hfdcp/lock", "the next"):
            pass

    def test_what_was_held_is_free_after_a_failure(self, store: Sink, other: Sink) -> None:
        with pytest.raises(ZeroDivisionError), store.hold("lock", "note"):
            _ = 1 / 0
        with other.hold("lock", "note"):
            pass

    def test_many_threads_read_many_files(self, store: Sink) -> None:
        for index in range(8):
            store.put(f"f{index}", bytes([index]) * 1000)
        jobs = [(index % 8, start) for index in range(40) for start in (0, 333, 666)]
        with ThreadPoolExecutor(8) as threads:
            found = threads.map(lambda job: store.read(f"f{job[0]}", job[1], job[1] + 300), jobs)
            assert list(found) == [bytes([index]) * 300 for index, _ in jobs]

    def test_free_bytes_are_known_or_unknown_but_not_negative(self, store: Sink) -> None:
        free = store.free_bytes()
        assert free is None or free > 0

    def test_a_local_path_holds_what_the_store_holds(self, store: Sink) -> None:
        store.put("f", b"x")
        path = store.local_path("f")
        assert path is None or path.read_bytes() == b"x"

    def test_the_url_opens_the_same_place(self, store: Sink) -> None:
        store.put("f", b"x")
        again = open_store(store.url)
        assert again.read("f", 0, 1) == b"x"
        assert store.url in repr(store)

    def test_a_new_store_is_empty_once_something_was_removed(self, store: Sink) -> None:
        store.put("keep/f", b"x")
        assert store.list() == Listing((), ("keep",))


class TestLocalStore(StoreLaws):
    @pytest.fixture
    def stores(self, tmp_path: Path) -> tuple[Sink, Sink]:
        return open_store(tmp_path / "new" / "place"), open_store(f"file://{tmp_path}/new/place/")


class TestMemoryStore(StoreLaws):
    @pytest.fixture
    def stores(self):
        url = f"memory://{secrets.token_hex(8)}"
        yield open_store(url), open_store(url + "/")
        if MemoryFileSystem().exists(url):
            MemoryFileSystem().rm(url, recursive=True)


class TestFsspecOnLocalFiles(StoreLaws):
    """A filesystem that can move files but not commit them."""

    @pytest.fixture
    def stores(self, tmp_path: Path) -> tuple[Sink, Sink]:
        root = f"{tmp_path}/new/place"
        return FsspecStore(LocalFileSystem(), root), FsspecStore(LocalFileSystem(), root)


class TestFaultyStoreOnMemory(StoreLaws):
    """A filesystem that can commit files."""

    @pytest.fixture
    def stores(self):
        with faulty_store(f"memory://{secrets.token_hex(8)}") as faults:
            yield open_store(faults.url), open_store(faults.url)


class TestFaultyStoreOnLocalFiles(StoreLaws):
    @pytest.fixture
    def stores(self, tmp_path: Path):
        with faulty_store(f"{tmp_path}/new") as faults:
            yield open_store(faults.url), open_store(f"{faults.url}/")


class TestGcs(StoreLaws):
    """gcsfs, against a server that keeps to the documents of Google Cloud Storage."""

    @pytest.fixture
    def stores(self, gcs: GcsServer):
        configure("gs", gcs.options)
        url = f"gs://{BUCKET}/{secrets.token_hex(8)}"
        yield open_store(url), open_store(f"gcs{url.removeprefix('gs')}/")
        configure("gs", {})


class TestS3(StoreLaws):
    """s3fs, against moto."""

    @pytest.fixture
    def stores(self, s3: Server):
        configure("s3", s3.options)
        url = f"s3://{s3.bucket}/{secrets.token_hex(8)}"
        yield open_store(url), open_store(f"s3a{url.removeprefix('s3')}/")
        configure("s3", {})


class TestFakeGcs(StoreLaws):
    """gcsfs, against fake-gcs-server: others wrote it, so it does not share our mistakes."""

    @pytest.fixture
    def stores(self, fake_gcs: Server):
        configure("gs", fake_gcs.options)
        url = f"gs://{fake_gcs.bucket}/{secrets.token_hex(8)}"
        yield open_store(url), open_store(f"{url}/")
        configure("gs", {})
