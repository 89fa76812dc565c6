import dataclasses
import pickle

import pytest

from hfdcp_core.manifest import INDEX_PATH, MANIFEST_PATH, FileRecord, Manifest, SourceCheck

WEIGHTS = tuple(
    FileRecord(f"model-0000{n}-of-00002.safetensors", 10, f"{n:064x}", {"w": "crc64nvme:00"}) for n in (1, 2)
)
INDEX = FileRecord(INDEX_PATH, 5, "0" * 64)
MANIFEST = Manifest("plan", "source", "dcp", WEIGHTS, (INDEX,), total_size=20)


def test_the_files_of_an_output_are_the_weights_then_the_rest_without_the_manifest() -> None:
    assert MANIFEST.files == (*WEIGHTS, INDEX)
    assert MANIFEST_PATH not in {record.path for record in MANIFEST.files}


def test_a_record_says_nothing_of_checks_that_were_not_made() -> None:
    assert INDEX.source == SourceCheck(verified=0, unchecked=0, parts=())


def test_a_manifest_compares_by_value_travels_and_cannot_be_changed() -> None:
    assert pickle.loads(pickle.dumps(MANIFEST)) == MANIFEST
    with pytest.raises(dataclasses.FrozenInstanceError, match="total_size"):
        MANIFEST.total_size = 1
