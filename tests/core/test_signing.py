"""Signatures: what is vouched for, and everything that must not pass for it."""

import base64
import hashlib
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from hfdcp_core.errors import UsageError
from hfdcp_core.signing import SIGNATURE_PATH, Signer, signature_problems

DIGESTS = {"b.safetensors": "b" * 64, "a.json": "a" * 64}
CURVES = {"P-256": ec.SECP256R1(), "P-384": ec.SECP384R1(), "P-521": ec.SECP521R1()}


def keys(folder: Path, curve: ec.EllipticCurve, name: str = "signer") -> tuple[str, str]:
    """Write a pair of keys, and return their paths."""
    key = ec.generate_private_key(curve)
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return str(private), str(public)


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
def test_a_signature_vouches_for_every_file(tmp_path: Path, curve: ec.EllipticCurve) -> None:
    private, public = keys(tmp_path, curve)
    bundle = Signer.load(private).bundle("m", DIGESTS)
    assert signature_problems(bundle, public, DIGESTS) == []


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
def test_the_statement_is_the_one_that_the_format_describes(tmp_path: Path, curve: ec.EllipticCurve) -> None:
    """DSSE: the signature is over type and payload with their lengths, by the hash that goes with the curve."""
    private, public = keys(tmp_path, curve)
    document = json.loads(Signer.load(private).bundle("m", DIGESTS))
    payload = base64.b64decode(document["dsseEnvelope"]["payload"])
    kind = document["dsseEnvelope"]["payloadType"]
    signed = f"DSSEv1 {len(kind)} {kind} {len(payload)} ".encode() + payload
    key = serialization.load_pem_public_key(Path(public).read_bytes())
    assert isinstance(key, ec.EllipticCurvePublicKey)
    used = {256: hashes.SHA256(), 384: hashes.SHA384(), 521: hashes.SHA512()}[curve.key_size]
    key.verify(base64.b64decode(document["dsseEnvelope"]["signatures"][0]["sig"]), signed, ec.ECDSA(used))
    statement = json.loads(payload)
    rows = [(row["name"], row["digest"]) for row in statement["predicate"]["resources"]]
    assert rows == sorted(DIGESTS.items())
    root = hashlib.sha256(bytes.fromhex("a" * 64 + "b" * 64)).hexdigest()
    assert statement["subject"] == [{"name": "m", "digest": {"sha256": root}}]


def test_another_digest_and_a_file_that_is_not_vouched_for_are_named(tmp_path: Path) -> None:
    private, public = keys(tmp_path, ec.SECP256R1())
    bundle = Signer.load(private).bundle("m", DIGESTS)
    there = {"a.json": "0" * 64, "new.safetensors": "1" * 64}
    assert signature_problems(bundle, public, there) == [
        f"a.json: sha256 is {'0' * 64}, the signature says {'a' * 64}",
        f"new.safetensors: sha256 is {'1' * 64}, the signature says nothing of it",
    ]


def test_another_key_and_another_payload_are_found(tmp_path: Path) -> None:
    private, _ = keys(tmp_path, ec.SECP256R1())
    _, other = keys(tmp_path, ec.SECP256R1(), "other")
    bundle = Signer.load(private).bundle("m", DIGESTS)
    assert signature_problems(bundle, other, DIGESTS) == [f"{SIGNATURE_PATH}: not signed with the key of {other}"]
    document = json.loads(bundle)
    payload = base64.b64decode(document["dsseEnvelope"]["payload"]).replace(b"a" * 64, b"0" * 64)
    document["dsseEnvelope"]["payload"] = base64.b64encode(payload).decode()
    changed = signature_problems(json.dumps(document).encode(), f"{tmp_path}/signer.pub", DIGESTS)
    assert changed == [f"{SIGNATURE_PATH}: not signed with the key of {tmp_path}/signer.pub"]


@pytest.mark.parametrize("raw", [b"", b"\xff", b"[]", b"{}", b'{"dsseEnvelope": {"payload": "?"}}', b"[" * 100_000])
def test_what_is_no_signature_is_one_problem(tmp_path: Path, raw: bytes) -> None:
    _, public = keys(tmp_path, ec.SECP256R1())
    [problem] = signature_problems(raw, public, DIGESTS)
    assert problem.startswith(f"{SIGNATURE_PATH}: no signature of a model")


def test_a_statement_of_another_kind_vouches_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private, public = keys(tmp_path, ec.SECP256R1())
    monkeypatch.setattr("hfdcp_core.signing._PREDICATE", "https://elsewhere/v1")
    bundle = Signer.load(private).bundle("m", DIGESTS)
    monkeypatch.undo()
    assert signature_problems(bundle, public, DIGESTS) == [
        f"{SIGNATURE_PATH}: vouches for something else than files with a SHA-256"
    ]


def test_keys_that_cannot_sign_are_refused(tmp_path: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (tmp_path / "rsa.pem").write_bytes(key.private_bytes(*form, serialization.NoEncryption()))
    locked = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "locked.pem").write_bytes(locked.private_bytes(*form, serialization.BestAvailableEncryption(b"secret")))
    odd = ec.generate_private_key(ec.SECP256K1())
    (tmp_path / "odd.pem").write_bytes(odd.private_bytes(*form, serialization.NoEncryption()))
    (tmp_path / "text.pem").write_text("nothing")
    for name, says in {
        "rsa": "an elliptic curve",
        "locked": "without a password",
        "odd": "secp256k1",
        "text": "no private key in PEM",
        "absent": "No such file",
    }.items():
        with pytest.raises(UsageError, match=says):
            Signer.load(f"{tmp_path}/{name}.pem")


def test_keys_that_cannot_verify_are_refused(tmp_path: Path) -> None:
    private, _ = keys(tmp_path, ec.SECP256R1())
    bundle = Signer.load(private).bundle("m", DIGESTS)
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).public_key()
    form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    (tmp_path / "rsa.pub").write_bytes(key.public_bytes(*form))
    with pytest.raises(UsageError, match="an elliptic curve"):
        signature_problems(bundle, f"{tmp_path}/rsa.pub", DIGESTS)
    with pytest.raises(UsageError, match="no public key in PEM"):
        signature_problems(bundle, f"{tmp_path}/absent.pub", DIGESTS)
