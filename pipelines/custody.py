"""Care of the keys: copies under a passphrase, and rotation that survives being killed half-way.

What can be rotated is what can be lost to a thief without the corpus changing its names: the ledger's signature, and the key
that seals the salts. The keyed digests (fingerprints, record ids, pseudonyms) are the identity of every record; new ones
would be a new lineage.

Rotating the ledger's signature, in this order, each step done once however often the command is repeated:

1. HOME/keys.next holds the new seed;
2. an entry of kind `key` names the new key and the root key, still signed by the old one;
3. the root key signs a key list: the old key up to this size, the new one from the next size on;
4. HOME/keys holds the new seed, HOME/keys.next goes.

The root key lies in a file of its own that should be kept elsewhere: whoever holds it decides which key is the ledger's.
"""

import dataclasses
import hashlib
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pipelines.steps.ledger import enter, key_list, open_ledger, origin
from pipelines.storage.errors import KeysError, SaltError
from pipelines.storage.keys import CorpusKeys, decode, encode, load, save
from pipelines.storage.salts import SaltStore
from provenance import (
    KeyList,
    SealError,
    SigningKey,
    root_name,
    seal,
    sign_key_list,
    unseal,
    vkey,
    write_atomic,
)

if TYPE_CHECKING:
    from pipelines.site import Site

MAGIC: Final = b"DWK1"
_SALT_SIZE: Final = 16
_SCRYPT: Final = {"n": 1 << 15, "r": 8, "p": 1, "maxmem": 1 << 26}  # 32 MiB and 0.1 s a guess


def export_keys(keys: CorpusKeys, path: Path, passphrase: str) -> None:
    """Write a copy of the keys that only the passphrase opens.

    Args:
        keys: The keys.
        path: A file that is not there yet.
        passphrase: At least 12 characters.

    Raises:
        KeysError: The passphrase is too short, or the file exists.
    """
    if len(passphrase) < 12:
        raise KeysError(f"a passphrase has at least 12 characters, got {len(passphrase)}")
    if path.exists():
        raise KeysError(f"{path.name} exists: keys are never written over another file")
    salt = secrets.token_bytes(_SALT_SIZE)
    write_atomic(
        path, MAGIC + salt + seal(_stretched(passphrase, salt), encode(keys), MAGIC), 0o600
    )


def read_export(path: Path, passphrase: str) -> CorpusKeys:
    """The keys in an exported copy.

    Args:
        path: The file.
        passphrase: The one that it was made with.

    Raises:
        KeysError: No such copy, or another passphrase.
    """
    data = path.read_bytes()
    if not data.startswith(MAGIC):
        raise KeysError(
            f"{path.name}: expected a copy made by `dataworth keys export`, got {data[:4]!r}"
        )
    salt, sealed = data[len(MAGIC) :][:_SALT_SIZE], data[len(MAGIC) + _SALT_SIZE :]
    try:
        return decode(unseal(_stretched(passphrase, salt), sealed, MAGIC))
    except SealError:
        raise KeysError(
            f"{path.name} does not open: another passphrase, or a damaged file"
        ) from None


def import_keys(site: "Site", keys: CorpusKeys) -> None:
    """Put imported keys into the home, after trying them on what is there.

    Raises:
        KeysError: The home has other keys, or the keys don't open its salts.
    """
    home = site.home
    if home.keys_path.exists() and load(home.keys_path) != keys:
        raise KeysError(
            "this home has other keys already; move HOME/keys away first if they are to be replaced"
        )
    SaltStore(home.salts_path, keys)  # raises when they are not this home's
    save(keys, home.keys_path)


def rotate_salts(site: "Site") -> None:
    """Seal the salts under a new key.

    Raises:
        KeysError: The demo keys cannot be rotated.
    """
    keys = _own(site)
    with site.home.lock("corpus"):
        store = SaltStore(site.home.salts_path, keys)
        fresh = dataclasses.replace(keys, k_salts=secrets.token_bytes(32))
        # The new key is durable before anything is sealed with it; a kill in between leaves both.
        save(fresh, _next(site, "salts"))
        store.reseal(fresh)
        save(fresh, site.home.keys_path)
        _next(site, "salts").unlink()


def finish_salts(site: "Site") -> bool:
    """Finish a rotation of the salts that was killed.

    Returns:
        Whether there was one.
    """
    path = _next(site, "salts")
    if not path.exists():
        return False
    fresh = load(path)
    with site.home.lock("corpus"):
        try:
            SaltStore(site.home.salts_path, fresh)
        except SaltError:  # still sealed under the old key: do it again
            SaltStore(site.home.salts_path, load(site.home.keys_path)).reseal(fresh)
        save(fresh, site.home.keys_path)
        path.unlink()
    return True


def rotate_ledger(site: "Site", root_file: Path) -> str:
    """Let a new key sign the ledger from the next size on.

    Args:
        site: The open home.
        root_file: Seed of the root key in hex; made now when it isn't there and no list was signed before.

    Returns:
        The new verifier key.

    Raises:
        KeysError: Demo keys, or not the root key that signed the list before.
    """
    keys, home = _own(site), site.home
    root = _root(site, root_file)
    pending = _next(site, "ledger")
    with home.lock("ledger-enter"):
        if not pending.exists():
            save(dataclasses.replace(keys, ledger_seed=secrets.token_bytes(32)), pending)
        fresh = load(pending)
        name = origin(site)
        new = vkey(name, SigningKey.from_seed(fresh.ledger_seed).public)
        root_line = vkey(root_name(name), root.public)
        known = key_list(home.ledger)
        if known is None or known.keys[-1][1] != new:
            old = vkey(name, SigningKey.from_seed(keys.ledger_seed).public)
            entry = enter(site, "key", {"vkey": new, "root": root_line, "before": old})
            first = max(entry + 1, open_ledger(site).size) + 1
            known = known or KeyList(name, 1, ((0, old),))
            write_atomic(home.ledger / "root.vkey", f"{root_line}\n".encode())
            write_atomic(home.ledger / "keys", sign_key_list(known.rotated(first, new), root))
        write_atomic(home.ledger / "vkey", f"{new}\n".encode())
        save(fresh, home.keys_path)
        pending.unlink()
    return new


def _root(site: "Site", path: Path) -> SigningKey:
    known = site.home.ledger / "root.vkey"
    if not path.exists():
        if known.exists():
            raise KeysError(
                f"the root key file {path.name} is missing; this ledger's key list is signed with it"
            )
        write_atomic(path, secrets.token_hex(32).encode() + b"\n", 0o600)
    if path.stat().st_mode & 0o077:
        raise KeysError(f"the root key file can be read by other users: chmod 600 {path.name}")
    try:
        root = SigningKey.from_seed(bytes.fromhex(path.read_text().strip()))
    except ValueError:
        raise KeysError(f"{path.name}: expected a root key of 64 hex digits") from None
    if known.exists() and known.read_text().strip() != vkey(root_name(origin(site)), root.public):
        raise KeysError(f"{path.name} is not the root key that signed this ledger's key list")
    return root


def _own(site: "Site") -> CorpusKeys:
    keys = load(site.home.keys_path)
    if keys.is_demo:
        raise KeysError(
            "demo keys are published and fixed, so that numbers can be reproduced: they are not rotated"
        )
    return keys


def _next(site: "Site", what: str) -> Path:
    return site.home.path / f"keys.next-{what}"


def _stretched(passphrase: str, salt: bytes) -> bytes:
    return hashlib.scrypt(os.fsencode(passphrase), salt=salt, dklen=32, **_SCRYPT)
