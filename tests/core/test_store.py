"""Which store a URL opens, and how stores behind fsspec meet the faults of their storages."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from hfdcp_core.errors import (
    CorruptFile,
    HfdcpError,
    NoSpace,
    StorageDenied,
    StorageError,
    StorageNotFound,
    UsageError,
    ValidationError,
)
from hfdcp_core.fsspec_store import PIECE_BYTES, READ_PAUSES_S, FsspecStore
from hfdcp_core.fsspec_upload import block_bytes
from hfdcp_core.store import LocalStore, commit_all, configure, open_store
from hfdcp_core.testing.faulty import FOREIGN_ERRORS, FOREVER, Fault, Faults, faulty_store

SECRET = "hunter2-and-more"


@pytest.fixture
def faults() -> Iterator[Faults]:
    with faulty_store("memory://test-store") as faults:
        yield faults
    if MemoryFileSystem().exists("test-store"):
        MemoryFileSystem().rm("test-store", recursive=True)


class TestOpenStore:
    @pytest.mark.parametrize("form", ["{0}", "file://{0}", "local://{0}", "{0}/", "{0}/./x/.."])
    def test_a_local_path_in_any_form_opens_the_local_store(self, tmp_path: Path, form: str) -> None:
        store = open_store(form.format(tmp_path))
        assert isinstance(store, LocalStore)
        assert store.url == str(tmp_path)

    def test_a_path_object_and_a_relative_path_do_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert open_store(tmp_path).url == open_store(".").url == str(tmp_path)
        assert open_store("a/b").url == f"{tmp_path}/a/b"

    @pytest.mark.parametrize("scheme", ["gs", "gcs", "s3", "hf", "memory", "https", "file"])
    def test_a_url_that_lost_a_slash_is_refused_with_the_reason(self, scheme: str) -> None:
        for mangled in (Path(f"{scheme}://bucket/x"), f"{scheme}:/bucket/x"):
            with pytest.raises(UsageError, match=f"write {scheme}:// with two slashes"):
                open_store(mangled)

    @pytest.mark.parametrize(
        ("url", "reason"),
        [
            ("", "is empty"),
            ("file://host/x", "names a host"),
            ("file://", "names no folder; .* file:///data/checkpoint"),
            ("nope://x", "Protocol not known: nope; write a path of this machine, a URL that begins with gs://, s3://"),
            ("hf://", "hf:// names no repository: write hf://owner/name, or hf://owner/name@revision"),
            ("hf://gpt2", "hf://gpt2 names no repository: write hf://owner/name"),
            ("gs://", "gs:// names no bucket or host: write gs://bucket/folder"),
            ("s3:///", "s3:/// names no bucket or host: write s3://bucket/folder"),
            ("https://", "https:// names no host: write https://host/path"),
            ("simplecache::gs://", "names no bucket or host: write gs://bucket/folder"),
            ("zip://", "names no archive: write zip://folder/in/it::/path/of/the/archive"),
            ("zip://step-1", "names no archive"),
            ("adl://x/y", "a package is not installed: .*adlfs"),
            ("memory://x::nope://y", "Protocol not known: nope"),
        ],
    )
    def test_what_cannot_be_a_store_is_refused(self, url: str, reason: str) -> None:
        with pytest.raises(UsageError, match=reason):
            open_store(url)

    @pytest.mark.parametrize("url", ["s3://b/k", "simplecache::s3://b/k"])
    def test_where_s3_is_not_installed_the_command_that_installs_it_is_named(self, url: str) -> None:
        tried = (
            "import sys; sys.modules['s3fs'] = None\n"
            "from hfdcp_core.errors import UsageError\n"
            "from hfdcp_core.store import open_store\n"
            f"try: open_store({url!r})\n"
            "except UsageError as error: print(error)"
        )
        ran = subprocess.run([sys.executable, "-c", tried], capture_output=True, text=True, check=True)
        assert ran.stdout == f"{url} cannot be opened: pip install 'hfdcp[s3]'\n"

    def test_the_root_of_a_storage_is_shown_as_it_is_written(self) -> None:
        assert open_store("memory://").url == "memory://"

    def test_an_option_that_a_storage_needs_is_named_and_no_value_is(self) -> None:
        with pytest.raises(UsageError, match="missing 1 required positional argument: 'repo'") as refused:
            open_store("github://x", storage_options={"org": SECRET})
        assert SECRET not in str(refused.value)

    def test_a_chain_of_filesystems_is_opened(self) -> None:
        open_store("memory://test-chain").put("f", b"content")
        store = open_store("simplecache::memory://test-chain")
        assert store.read("f", 0, 7) == b"content"
        open_store("memory://test-chain").delete("f")

    def test_a_storage_that_fails_while_it_is_opened_has_our_class(self, tmp_path: Path) -> None:
        with pytest.raises(StorageNotFound, match="cannot open zip://x::file://"):
            open_store(f"zip://x::file://{tmp_path}/absent.zip")

    def test_a_local_store_does_not_import_fsspec(self, tmp_path: Path) -> None:
        script = (
            "import sys; from hfdcp_core.store import open_store; s = open_store(sys.argv[1]); s.put('f', b'x');"
            "s.read('f', 0, 1); print([m for m in ('fsspec', 'aiohttp', 'torch', 'prefect') if m in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True)
        assert done.stdout == "[]\n"


class TestSecrets:
    @pytest.fixture
    def denied(self, faults: Faults) -> FsspecStore:
        error = RuntimeError(f"key {SECRET} refused at https://me:pw@host/x?signature=abc, Authorization: Bearer t0ken")
        faults.add(Fault("list", times=FOREVER, error=error))
        configure("faulty", {"nested": {"key": SECRET}})
        store = open_store(faults.url, storage_options={"token": "another-secret"})
        configure("faulty", {})
        assert isinstance(store, FsspecStore)
        return store

    def test_no_message_repeats_an_option_a_password_or_a_signature(self, denied: FsspecStore) -> None:
        with pytest.raises(StorageError, match=r"key \*\*\* refused at https://\*\*\*@host/x") as error:
            denied.list()
        for secret in (SECRET, "me:pw", "signature", "t0ken", "another-secret"):
            assert secret not in f"{error.value} {error.value!r}"

    def test_neither_the_store_nor_its_url_shows_an_option(self, denied: FsspecStore) -> None:
        assert SECRET not in f"{denied!r} {denied.url} {denied}"

    def test_a_password_in_a_url_is_not_shown(self) -> None:
        store = open_store("https://me:pw@host/folder?signature=abc")
        assert store.url == "https://***@host/folder"


class TestFaultsOfReading:
    def test_a_read_that_fails_for_a_moment_succeeds(self, faults: Faults) -> None:
        store = open_store(faults.url)
        store.put("f", b"0123456789")
        faults.add(Fault("read", times=len(READ_PAUSES_S), error=FOREIGN_ERRORS[StorageError]))
        assert store.read("f", 2, 5) == b"234"
        assert faults.attempts("read") == len(READ_PAUSES_S) + 1

    @pytest.mark.parametrize("kind", FOREIGN_ERRORS, ids=lambda kind: kind.__name__)
    def test_what_a_storage_raises_has_our_class_and_its_cause(self, faults: Faults, kind: type[HfdcpError]) -> None:
        store = open_store(faults.url)
        store.put("f", b"0123456789")
        faults.fail_once(kind)
        with pytest.raises(kind, match=rf"cannot read {faults.url}/f: ") as raised:
            store.read("f", 2, 5)
        assert type(raised.value) is kind
        assert type(raised.value.__cause__) is type(FOREIGN_ERRORS[kind]())
        assert store.read("f", 2, 5) == b"234"

    @pytest.mark.parametrize("kind", [StorageDenied, StorageNotFound, NoSpace], ids=lambda kind: kind.__name__)
    def test_what_cannot_pass_is_not_tried_again(self, faults: Faults, kind: type[HfdcpError]) -> None:
        store = open_store(faults.url)
        store.put("f", b"0123456789")
        faults.fail_once(kind)
        with pytest.raises(kind):
            store.read("f", 2, 5)
        assert faults.attempts("read") == 1

    def test_a_file_that_is_cut_short_is_corrupt(self, faults: Faults) -> None:
        store = open_store(faults.url)
        store.put("f", b"0123456789")
        faults.fail_once(CorruptFile)
        with pytest.raises(CorruptFile, match=r"expected bytes \[2, 5\), found the end of the file at byte 0"):
            store.read("f", 2, 5)
        assert store.read("f", 2, 5) == b"234"

    def test_a_short_reply_of_a_whole_file_is_tried_again(self, faults: Faults) -> None:
        store = open_store(faults.url)
        store.put("f", b"0123456789")
        faults.add(Fault("read", short=1))
        assert store.read("f", 2, 5) == b"234"

    def test_a_storage_that_always_answers_too_little_has_failed(self, faults: Faults) -> None:
        store = open_store(faults.url)
        store.put("f", b"0123456789")
        faults.add(Fault("read", times=FOREVER, short=1))
        with pytest.raises(StorageError, match=r"asked for bytes \[2, 5\), 1 bytes came"):
            store.read("f", 2, 5)

    def test_a_large_read_is_made_of_pieces_and_only_the_failed_one_is_repeated(self, faults: Faults) -> None:
        store = open_store(faults.url)
        content = bytes(range(251)) * (2 * PIECE_BYTES // 251)
        store.put("f", content)
        faults.add(Fault("read", nth=2, error=FOREIGN_ERRORS[StorageError]))
        assert store.read("f", 3, len(content)) == content[3:]
        reads = [(call.start, call.outcome) for call in faults.journal if call.operation == "read"]
        starts = sorted(start for start, outcome in reads if outcome == "ok")
        failed = [start for start, outcome in reads if outcome != "ok"]
        assert starts == [3, PIECE_BYTES + 3]
        assert len(failed) == 1

    def test_a_file_that_vanishes_between_two_tries_is_not_found(self, faults: Faults) -> None:
        store = open_store(faults.url)
        store.put("f", b"0123456789")
        faults.add(Fault("read", error=FOREIGN_ERRORS[StorageError], then=lambda: store.delete("f")))
        with pytest.raises(StorageNotFound, match="cannot look at"):
            store.read("f", 2, 5)

    def test_a_read_goes_on_though_the_size_cannot_be_asked_for(self, faults: Faults) -> None:
        store = open_store(faults.url)
        store.put("f", b"0123456789")
        faults.add(Fault("read", error=FOREIGN_ERRORS[StorageError]))
        faults.add(Fault("stat", error=FOREIGN_ERRORS[StorageError]))
        assert store.read("f", 2, 5) == b"234"


class Terse(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Says as little as plain HTTP servers do: no times, and no sizes in a listing."""

    def ls(self, path: str, **_: object) -> list[dict[str, object]]:
        return [{"name": entry["name"], "size": None, "type": entry["type"]} for entry in super().ls(path)]

    def info(self, path: str, **_: object) -> dict[str, object]:
        return {name: value for name, value in super().info(path).items() if name != "created"}


class TestStorageThatSaysLittle:
    @pytest.fixture
    def store(self) -> FsspecStore:
        return FsspecStore(Terse(global_store=False, skip_instance_cache=True), "/root")

    def test_sizes_are_asked_for_one_by_one(self, store: FsspecStore) -> None:
        store.put("f", b"0123456789")
        assert [(file.path, file.size) for file in store.list().files] == [("f", 10)]

    @pytest.mark.parametrize("changed", [0, 9_999], ids=["first byte", "last byte"])
    def test_a_change_shows_in_the_content(self, store: FsspecStore, changed: int) -> None:
        content = bytearray(10_000)
        store.put("f", bytes(content))
        before = store.stat("f")
        assert store.list().files == (before,)
        content[changed] = 1
        store.put("f", bytes(content))
        assert store.stat("f") != before


class TestFaultsOfWriting:
    @pytest.mark.parametrize("operation", ["create", "write", "commit"])
    @pytest.mark.parametrize("kind", FOREIGN_ERRORS, ids=lambda kind: kind.__name__)
    def test_a_failed_write_leaves_the_older_file_even_to_the_collector(
        self, faults: Faults, operation: str, kind: type[HfdcpError]
    ) -> None:
        store = open_store(faults.url)
        store.put("f", b"old")
        faults.clear()
        faults.add(Fault(operation, error=FOREIGN_ERRORS[kind]))  # type: ignore[arg-type]
        with pytest.raises(kind, match=f"cannot write {faults.url}/f") as raised:
            store.put("f", b"newer")
        assert type(raised.value) is kind
        del raised
        gc.collect()
        assert [file.path for file in store.list().files] == ["f"]
        assert store.read("f", 0, 3) == b"old"

    def test_a_part_that_fails_in_the_middle_leaves_nothing(self, faults: Faults) -> None:
        store = open_store(faults.url)
        store.put("other", b"x")
        faults.clear()
        faults.add(Fault("write", nth=2, error=FOREIGN_ERRORS[StorageError]))
        upload = store.create("f", 64 << 20)
        with pytest.raises(StorageError, match="cannot write"):
            upload.write(memoryview(bytes(64 << 20)))
        upload.abort()
        del upload
        gc.collect()
        assert [call.stop for call in faults.journal if call.operation == "write"] == [16 << 20, 32 << 20]
        assert [file.path for file in store.list().files] == ["other"]

    def test_a_file_that_is_dropped_while_it_is_written_is_not_remembered(self, faults: Faults) -> None:
        store = open_store(faults.url)
        assert isinstance(store, FsspecStore)
        for _ in range(3):
            store.put("f", b"x")
        assert not store._fs.transaction.files

    @pytest.mark.parametrize(("operation", "call"), [("list", "list"), ("stat", "stat"), ("delete", "delete")])
    def test_other_failures_are_told_at_once(self, faults: Faults, operation: str, call: str) -> None:
        store = open_store(faults.url)
        store.put("f", b"x")
        faults.clear()
        faults.add(Fault(operation, error=FOREIGN_ERRORS[StorageError]))  # type: ignore[arg-type]
        calls = {"list": store.list, "stat": lambda: store.stat("f"), "delete": lambda: store.delete("f")}
        with pytest.raises(StorageError, match="connection reset"):
            calls[call]()
        assert faults.attempts(operation) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, 1, 5_000_000_000, 1 << 38, 5 << 40])
def test_no_file_has_too_many_parts_for_any_storage(size: int) -> None:
    block = block_bytes(size)
    assert -(-size // block) <= 9_000
    assert block % (256 << 10) == 0
    assert block >= 16 << 20


def test_files_that_appear_together_are_all_finished_before_the_first_has_its_name(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for name in ("a", "b"):
        store.put(name, b"old")
    uploads = [store.create(name, 3) for name in ("a", "b", "c")]
    for upload, data in zip(uploads, (b"new", b"new", b"ne"), strict=True):
        upload.write(memoryview(data))
    with pytest.raises(ValidationError, match="2 were written"):
        commit_all(uploads)
    assert (store.read_whole("a"), store.read_whole("b")) == (b"old", b"old")
    uploads[2].write(memoryview(b"w"))
    commit_all(uploads)
    assert [store.read_whole(name) for name in "abc"] == [b"new"] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]
