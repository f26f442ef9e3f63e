"""What was used, provably: canonical bytes, Merkle trees, commitments, a signed ledger, receipts.

The layers, each readable alone and importing only those to its right::

    receipts, tiles, witness -> ledger -> journal -> entries, keylist, locking
             -> signing, merkle, crown, sparse, sumtree, chainpoint, versions
             -> proofs, compact, commitment, sealing -> canonical, hashing -> errors

``provenance.verify_standalone`` imports none of them: it is the file an owner can copy out and run alone.
Names are loaded on first use, so ``import provenance`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from provenance.canonical import (
        CANONICALISATION,
        canonical_bytes,
        fingerprint,
        jcs,
        keyed,
        parse_json,
        record_id,
        write_atomic,
    )
    from provenance.chainpoint import (
        ChainpointTree,
        chainpoint_leaf,
        chainpoint_tree,
        to_chainpoint_v2,
        verify_chainpoint_v2,
    )
    from provenance.commitment import commit, commit_digest, leaf_data, tombstone_leaf
    from provenance.compact import CompactRange
    from provenance.errors import (
        FormatError,
        HistoryError,
        LedgerError,
        ProofShapeError,
        ProvenanceError,
        RootMismatchError,
        SealError,
        SignatureError,
        VerificationError,
    )
    from provenance.hashing import file_sha256, leaf_hash, node_hash, sha256
    from provenance.keylist import KeyList, open_key_list, root_name, sign_key_list
    from provenance.ledger import Ledger
    from provenance.merkle import MerkleTree, root_of
    from provenance.proofs import (
        verify_consistency,
        verify_inclusion,
        verify_subtree_consistency,
        verify_subtree_inclusion,
    )
    from provenance.receipts import (
        CorpusState,
        IssuedReceipt,
        ReceiptOwner,
        ReceiptRecord,
        TlogProof,
        absence_proof,
        build_receipt,
        issue_receipts,
        ledger_entry_proof,
        parse_tlog_proof,
        prices_body,
        receipt_digest,
        sum_path_of,
        tlog_proof,
        value_leaf,
        value_proof,
        values_body,
    )
    from provenance.sealing import seal, unseal
    from provenance.signing import (
        Checkpoint,
        SigningKey,
        checkpoint_text,
        note_text,
        open_checkpoint,
        parse_checkpoint,
        parse_vkey,
        sign_note,
        verify_note,
        vkey,
    )
    from provenance.sparse import SparseProof, SparseTree, verify_absence, verify_presence
    from provenance.sumtree import SumTree, verify_sum
    from provenance.tiles import publish, read_tiles, split_bundle, tile_path
    from provenance.upgrade import upgrade_ledger
    from provenance.verify_standalone import VerifyError, verify_receipt, verify_text
    from provenance.versions import Versions
    from provenance.witness import Witness, cosign, verify_cosignature
    from provenance.workers import build_tree

_NAMES_OF = {
    "canonical": "CANONICALISATION canonical_bytes fingerprint jcs keyed parse_json record_id"
    " write_atomic",
    "chainpoint": "ChainpointTree chainpoint_leaf chainpoint_tree to_chainpoint_v2"
    " verify_chainpoint_v2",
    "commitment": "commit commit_digest leaf_data tombstone_leaf",
    "compact": "CompactRange",
    "errors": "FormatError HistoryError LedgerError ProofShapeError ProvenanceError RootMismatchError SealError"
    " SignatureError VerificationError WorkerError",
    "hashing": "file_sha256 leaf_hash node_hash sha256",
    "keylist": "KeyList open_key_list root_name sign_key_list",
    "ledger": "Ledger",
    "merkle": "MerkleTree root_of",
    "proofs": "verify_consistency verify_inclusion verify_subtree_consistency"
    " verify_subtree_inclusion",
    "receipts": "CorpusState IssuedReceipt ReceiptOwner ReceiptRecord TlogProof absence_proof"
    " build_receipt issue_receipts ledger_entry_proof parse_tlog_proof prices_body receipt_digest"
    " sum_path_of tlog_proof value_leaf value_proof values_body",
    "sealing": "seal unseal",
    "signing": "Checkpoint SigningKey checkpoint_text note_text open_checkpoint parse_checkpoint parse_vkey"
    " sign_note verify_note vkey",
    "sparse": "SparseProof SparseTree verify_absence verify_presence",
    "sumtree": "SumTree verify_sum",
    "tiles": "publish read_tiles split_bundle tile_path",
    "upgrade": "upgrade_ledger",
    "verify_standalone": "VerifyError verify_receipt verify_text",
    "versions": "Versions",
    "witness": "Witness cosign verify_cosignature",
    "workers": "build_tree",
}
_HOME_OF = {name: module for module, names in _NAMES_OF.items() for name in names.split()}

__all__ = [
    "CANONICALISATION",
    "ChainpointTree",
    "Checkpoint",
    "CompactRange",
    "CorpusState",
    "FormatError",
    "HistoryError",
    "IssuedReceipt",
    "KeyList",
    "Ledger",
    "LedgerError",
    "MerkleTree",
    "ProofShapeError",
    "ProvenanceError",
    "ReceiptOwner",
    "ReceiptRecord",
    "RootMismatchError",
    "SealError",
    "SignatureError",
    "SigningKey",
    "SparseProof",
    "SparseTree",
    "SumTree",
    "TlogProof",
    "VerificationError",
    "VerifyError",
    "Versions",
    "Witness",
    "WorkerError",
    "absence_proof",
    "build_receipt",
    "build_tree",
    "canonical_bytes",
    "chainpoint_leaf",
    "chainpoint_tree",
    "checkpoint_text",
    "commit",
    "commit_digest",
    "cosign",
    "file_sha256",
    "fingerprint",
    "issue_receipts",
    "jcs",
    "keyed",
    "leaf_data",
    "leaf_hash",
    "ledger_entry_proof",
    "node_hash",
    "note_text",
    "open_checkpoint",
    "open_key_list",
    "parse_checkpoint",
    "parse_json",
    "parse_tlog_proof",
    "parse_vkey",
    "prices_body",
    "publish",
    "read_tiles",
    "receipt_digest",
    "record_id",
    "root_name",
    "root_of",
    "seal",
    "sha256",
    "sign_key_list",
    "sign_note",
    "split_bundle",
    "sum_path_of",
    "tile_path",
    "tlog_proof",
    "to_chainpoint_v2",
    "tombstone_leaf",
    "unseal",
    "upgrade_ledger",
    "value_leaf",
    "value_proof",
    "values_body",
    "verify_absence",
    "verify_chainpoint_v2",
    "verify_consistency",
    "verify_cosignature",
    "verify_inclusion",
    "verify_note",
    "verify_presence",
    "verify_receipt",
    "verify_subtree_consistency",
    "verify_subtree_inclusion",
    "verify_sum",
    "verify_text",
    "vkey",
    "write_atomic",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'provenance' has no attribute {name!r}")
    value = getattr(import_module(f"provenance.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, for completion in a shell."""
    return sorted(__all__)
