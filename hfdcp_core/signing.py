"""To sign is to vouch for the files of a repository: an OpenSSF model signature, made of digests that are known.

The bundle is what ``model_signing`` writes and reads (a DSSE envelope around an in-toto statement with the SHA-256 of
every file), for keys on the curves P-256, P-384 and P-521. No file is read for it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hfdcp_core.errors import UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import HashAlgorithm

SIGNATURE_PATH = "model.sig"
"""The customary name of the bundle in a repository."""
IGNORED = (".git", ".gitattributes", ".gitignore", ".github")
"""What the signature says nothing of, as ``model_signing`` leaves it out."""
_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://model_signing/signature/v1.0"
_PAYLOAD = "application/vnd.in-toto+json"
_BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"


@dataclass(frozen=True, slots=True)
class Signer:
    """A private key, loaded before anything else is done."""

    key: ec.EllipticCurvePrivateKey
    """The key."""

    @classmethod
    def load(cls, path: str) -> Signer:
        """Read a private key in PEM.

        Raises:
            UsageError: There is none, it has a password, or is on another curve.
        """
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        try:
            key = serialization.load_pem_private_key(Path(path).read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"--sign {path}: no private key in PEM without a password: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise UsageError(f"--sign {path}: a key on an elliptic curve is needed (P-256, P-384 or P-521)")
        _hash_of(key.curve, path)
        return cls(key)

    def bundle(self, name: str, digests: Mapping[str, str]) -> bytes:
        """Return a bundle that vouches for files, by their names and SHA-256."""
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        payload = json.dumps(_statement(name, digests)).encode()
        signature = self.key.sign(_envelope(payload), ec.ECDSA(_hash_of(self.key.curve, "")))
        public = self.key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        document = {
            "mediaType": _BUNDLE,
            "verificationMaterial": {"publicKey": {"hint": hashlib.sha256(public).hexdigest()}, "tlogEntries": []},
            "dsseEnvelope": {
                "payload": base64.b64encode(payload).decode(),
                "payloadType": _PAYLOAD,
                "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
            },
        }
        return json.dumps(document).encode()


def _statement(name: str, digests: Mapping[str, str]) -> Mapping[str, object]:
    rows = [{"name": path, "algorithm": "sha256", "digest": digests[path]} for path in sorted(digests)]
    root = hashlib.sha256(b"".join(bytes.fromhex(digests[path]) for path in sorted(digests))).hexdigest()
    form = {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": list(IGNORED)}
    return {
        "_type": _STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": root}}],
        "predicateType": _PREDICATE,
        "predicate": {"serialization": form, "resources": rows},
    }


def _envelope(payload: bytes) -> bytes:
    """Return what is signed: DSSE's encoding of type and payload."""
    kind = _PAYLOAD.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def _hash_of(curve: ec.EllipticCurve, path: str) -> HashAlgorithm:
    from cryptography.hazmat.primitives import hashes

    known: Mapping[str, HashAlgorithm] = {
        "secp256r1": hashes.SHA256(),
        "secp384r1": hashes.SHA384(),
        "secp521r1": hashes.SHA512(),
    }
    if curve.name not in known:
        raise UsageError(f"{path}: the key is on the curve {curve.name}; P-256, P-384 and P-521 are known")
    return known[curve.name]


def signature_problems(raw: bytes, public_key: str, digests: Mapping[str, str]) -> Sequence[str]:
    """Hold a bundle against a public key, and the files that it vouches for against what is there.

    Args:
        raw: The bundle.
        public_key: Path of the key, in PEM.
        digests: SHA-256 of every file that must be vouched for, by name.

    Returns:
        What is wrong.

    Raises:
        UsageError: There is no such key.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_pem_public_key(Path(public_key).read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"--public-key {public_key}: no public key in PEM: {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise UsageError(f"--public-key {public_key}: a key on an elliptic curve is needed")
    try:
        envelope = json.loads(raw)["dsseEnvelope"]
        payload = base64.b64decode(envelope["payload"], validate=True)
        signature = base64.b64decode(envelope["signatures"][0]["sig"], validate=True)
        key.verify(signature, _envelope(payload), ec.ECDSA(_hash_of(key.curve, f"--public-key {public_key}")))
        statement = json.loads(payload)
        rows = {str(row["name"]): str(row["digest"]) for row in statement["predicate"]["resources"]}
        kinds = statement["predicateType"], {row["algorithm"] for row in statement["predicate"]["resources"]}
    except InvalidSignature:
        return [f"{SIGNATURE_PATH}: not signed with the key of {public_key}"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        return [f"{SIGNATURE_PATH}: no signature of a model: {error!r}"]
    if kinds != (_PREDICATE, {"sha256"}):
        return [f"{SIGNATURE_PATH}: vouches for something else than files with a SHA-256"]
    return [
        f"{path}: sha256 is {digest}, the signature says {rows.get(path, 'nothing of it')}"
        for path, digest in sorted(digests.items())
        if rows.get(path) != digest
    ]
