"""What goes into an influence method and what comes out, tied to the data and the weights they are of.

A corpus that changed between two runs turned a good method's agreement with retraining from .60 into
.20, and nothing said so. Therefore scores carry a *binding*, five digests of what they were computed
from, and whoever uses them names what he believes they are of: a difference is refused, by name.

    scores.npz    scores_QN, query_index_Q, train_index_N, query_ids, record_ids
    scores.json   canonical JSON: format, method, binding, digest over the logical arrays

Legend: Q queries, N records.
"""
# ruff: noqa: N802 - a property with a shape suffix in its name (STYLE 2)

from __future__ import annotations

import hashlib
import io
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from provenance.canonical import jcs, parse_json, write_atomic
from provenance.hashing import leaf_hash
from provenance.merkle import root_of
from valuation.errors import GradientError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import nn

    from trainer.data import Batch, TokenStore

FORMAT = 1
SCORES_FILE, ARRAYS_FILE = "scores.json", "scores.npz"
Record = tuple[int, bytes, "NDArray[Any]"]
"""(corpus index, record id, tokens), as `trainer.data.pack` takes it."""


@dataclass(frozen=True, slots=True)
class TokenSet:
    """Records to score, or queries to score them for."""

    records: tuple[Record, ...]
    """(index, record id, tokens), in ascending order of index; each index and id once."""
    length: int
    """Tokens in a row; a longer record goes on in the next row without its context, as in training."""
    data_root: str = "none"
    """Merkle root of the corpus that the records are of, or "none": then of their ids alone (`bind`)."""
    tokenizer_digest: str = "none"
    """Digest of the tokenizer, or "none"."""

    def __post_init__(self) -> None:
        if self.length < 1:
            raise GradientError(f"length: expected at least 1 token in a row, got {self.length}")
        ordered = tuple(sorted(self.records, key=lambda record: record[0]))
        object.__setattr__(self, "records", ordered)  # any order gives the same set
        if wrong := [index for index, record_id, _ in ordered if len(record_id) != 32]:
            raise GradientError(f"record id: expected 32 bytes, got others at indices {wrong[:5]}")
        for what, values in (("index", self.index_N.tolist()), ("record id", self.ids)):
            if len(set(values)) != len(values):
                raise GradientError(
                    f"{what}: expected each once, got some twice; score records once"
                )

    @classmethod
    def of(cls, store: TokenStore, length: int, index_N: Iterable[int] | None = None) -> Self:
        """Records of a token store.

        Args:
            store: the documents.
            length: tokens in a row.
            index_N: their indices; None = all live ones.
        """
        chosen = store.live_N if index_N is None else index_N
        return cls(
            tuple((int(i), store.record_id(int(i)), store.tokens(int(i))) for i in chosen),
            length, store.corpus_root(), store.tokenizer_digest,
        )  # fmt: skip

    @property
    def index_N(self) -> NDArray[np.int64]:
        """Corpus index of each record."""
        return np.array([index for index, _, _ in self.records], dtype=np.int64)

    @property
    def ids(self) -> tuple[bytes, ...]:
        """Record id of each record."""
        return tuple(record_id for _, record_id, _ in self.records)

    @property
    def labels_N(self) -> NDArray[np.int64]:
        """Predicted tokens of each record: all but the first."""
        return np.array([max(len(tokens) - 1, 0) for *_, tokens in self.records], dtype=np.int64)

    def texts(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """(index, tokens) of each record, as `valuation.heldout` takes them."""
        return ((index, tokens) for index, _, tokens in self.records)

    def take(self, place_M: Sequence[int] | NDArray[np.int64]) -> TokenSet:
        """The records at these places as a set of their own."""
        chosen = tuple(self.records[int(place)] for place in place_M)
        return TokenSet(chosen, self.length, self.data_root, self.tokenizer_digest)

    def blocks(self, rows: int) -> list[range]:
        """Places of consecutive records whose tokens fill at most `rows` rows; at least one record each.

        Raises:
            GradientError: rows < 1.
        """
        if rows < 1:
            raise GradientError(f"rows: expected at least 1, got {rows}")
        blocks, start, used = [], 0, 0
        for place, (*_, tokens) in enumerate(self.records):
            if place > start and used + len(tokens) > rows * self.length:
                blocks.append(range(start, place))
                start, used = place, 0
            used += len(tokens)
        if self.records:
            blocks.append(range(start, len(self.records)))
        return blocks

    def batch(self, block: range) -> Batch:
        """The records of a block, packed."""
        from trainer.data import pack

        return pack([self.records[place] for place in block], self.length)

    def batches(self, rows: int) -> Iterator[Batch]:
        """All records in batches of about `rows` rows; no record stands in two batches.

        Args:
            rows: rows of `length` tokens, >= 1; a record that needs more gets a batch of its own.

        Yields:
            Packed rows; a few more than `rows` where whole records leave gaps.
        """
        return (self.batch(block) for block in self.blocks(rows))

    def digest(self) -> str:
        """Hex SHA-256 of indices, ids, lengths and tokens, and of the row length, which cuts documents."""
        state = hashlib.sha256(b"dataworth-token-set-1|%d|%d\n" % (self.length, len(self.records)))
        for index, record_id, tokens in self.records:
            state.update(np.array([index, len(record_id), len(tokens)], dtype="<i8").tobytes())
            state.update(record_id)
            state.update(np.ascontiguousarray(tokens, dtype="<u4").tobytes())
        return state.hexdigest()


@dataclass(frozen=True, slots=True)
class Binding:
    """What scores were computed from; hex digests, or an explicit "none"."""

    data_root: str
    """Merkle root of the corpus, or of the record ids where there is no corpus."""
    tokens_digest: str
    """`TokenSet.digest` of the training records."""
    tokenizer_digest: str
    """Digest of the tokenizer."""
    checkpoint_root: str
    """Logical root of the weights (`trainer.root`), or a digest over those of several checkpoints."""
    query_digest: str
    """`TokenSet.digest` of the queries."""


def bind(models: nn.Module | Sequence[nn.Module], train: TokenSet, queries: TokenSet) -> Binding:
    """The binding of scores of these records, for these queries, by these weights.

    Args:
        models: one model, or the checkpoints of a trajectory in their order.
        train: training records.
        queries: queries.

    Returns:
        The five digests.

    Raises:
        GradientError: the two sets are of two tokenizers.
    """
    if len({train.tokenizer_digest, queries.tokenizer_digest} - {"none"}) > 1:
        raise GradientError(
            f"tokenizer: expected one, got {train.tokenizer_digest} for the records and "
            f"{queries.tokenizer_digest} for the queries; tokenize both alike"
        )
    import torch

    checkpoints = [models] if isinstance(models, torch.nn.Module) else list(models)
    roots = [weights_root(model) for model in checkpoints]
    ids = [leaf_hash(record_id) for record_id in sorted(train.ids)]
    return Binding(
        data_root=root_of(ids).hex() if train.data_root == "none" else train.data_root,
        tokens_digest=train.digest(),
        tokenizer_digest=train.tokenizer_digest,
        checkpoint_root=roots[0] if len(roots) == 1 else hashlib.sha256(jcs(roots)).hexdigest(),
        query_digest=queries.digest(),
    )


def weights_root(model: nn.Module) -> str:
    """Logical root of a model's weights, as result.json names it (`model_root`)."""
    from trainer.root import state_root

    return state_root({f"model.{name}": p.detach() for name, p in model.named_parameters()})


@dataclass(frozen=True, slots=True)
class Scores:
    """Influence of each record on each query; positive = training on the record lowers the query's loss."""

    scores_QN: NDArray[np.float64]
    """Scale is the method's own; only orders and ratios within a method have a meaning."""
    query_index_Q: NDArray[np.int64]
    """Corpus index of each query."""
    train_index_N: NDArray[np.int64]
    """Corpus index of each record."""
    query_ids: tuple[bytes, ...]
    """Id of each query."""
    record_ids: tuple[bytes, ...]
    """Id of each record."""
    method: str
    """Name with settings, such as "ekfac(damping=0.1)"."""
    binding: Binding
    """What they are of."""
    notes: dict[str, str] = field(default_factory=dict)
    """What the method has to say about this run, such as the residual of a solver."""

    def __post_init__(self) -> None:
        want = (len(self.query_index_Q), len(self.train_index_N))
        if self.scores_QN.shape != want or self.scores_QN.dtype != np.float64:
            raise GradientError(
                f"scores: expected float64 of shape {want}, got {self.scores_QN.dtype} {self.scores_QN.shape}"
            )
        if not np.isfinite(self.scores_QN).all():
            bad = self.train_index_N[~np.isfinite(self.scores_QN).all(0)]
            raise GradientError(
                f"scores of {self.method}: expected finite numbers, got others for record indices {bad[:5].tolist()}"
            )
        if (len(self.query_ids), len(self.record_ids)) != want:
            raise GradientError(
                f"scores: expected one id per row and column {want}, got {(len(self.query_ids), len(self.record_ids))}"
            )

    def require(self, binding: Binding) -> None:
        """Refuse scores that are of other data, queries, tokenizer or weights.

        Args:
            binding: what they must be of.

        Raises:
            GradientError: the item that differs, what was expected and what was got.
        """
        for item, expected in asdict(binding).items():
            if (got := getattr(self.binding, item)) != expected:
                raise GradientError(
                    f"scores of {self.method}: {item}: expected {expected}, got {got}; compute them again"
                )

    def totals_N(self, weight_Q: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
        """Influence on the sum of all queries' losses, or on a weighted one."""
        return self.scores_QN.sum(0) if weight_Q is None else weight_Q @ self.scores_QN

    def save(self, folder: Path) -> str:
        """Write scores.npz, then scores.json.

        Args:
            folder: made if needed.

        Returns:
            Hex SHA-256 of scores.json.
        """
        folder.mkdir(parents=True, exist_ok=True)
        arrays, buffer = self._arrays(), io.BytesIO()
        np.savez(
            buffer, scores_QN=arrays["scores_QN"], query_index_Q=arrays["query_index_Q"],
            train_index_N=arrays["train_index_N"], query_ids=arrays["query_ids"], record_ids=arrays["record_ids"],
        )  # fmt: skip
        write_atomic(folder / ARRAYS_FILE, buffer.getvalue())
        data = jcs(
            {
                "format": FORMAT, "method": self.method, "binding": asdict(self.binding),
                "notes": self.notes, "digest": _digest(arrays),
            }
        )  # fmt: skip
        write_atomic(folder / SCORES_FILE, data)
        return hashlib.sha256(data).hexdigest()

    @classmethod
    def load(cls, folder: Path, binding: Binding | None = None) -> Scores:
        """Read scores and check them.

        Args:
            folder: where `save` wrote them.
            binding: what they must be of; None takes their own word.

        Raises:
            GradientError: missing, altered, of another format, or of another binding.
        """
        try:
            document = parse_json((folder / SCORES_FILE).read_bytes())
            with np.load(folder / ARRAYS_FILE, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        except (OSError, ValueError, KeyError) as error:
            raise GradientError(
                f"scores: cannot be read ({type(error).__name__}); compute them again"
            ) from error
        if document.get("format") != FORMAT:
            raise GradientError(f"scores: expected format {FORMAT}, got {document.get('format')}")
        if (got := _digest(arrays)) != document["digest"]:
            raise GradientError(
                f"scores: expected digest {document['digest']}, got {got}; they were altered"
            )
        scores = cls(
            scores_QN=arrays["scores_QN"],
            query_index_Q=arrays["query_index_Q"],
            train_index_N=arrays["train_index_N"],
            query_ids=tuple(row.tobytes() for row in arrays["query_ids"]),
            record_ids=tuple(row.tobytes() for row in arrays["record_ids"]),
            method=document["method"],
            binding=Binding(**document["binding"]),
            notes=document["notes"],
        )
        if binding is not None:
            scores.require(binding)
        return scores

    def _arrays(self) -> dict[str, NDArray[Any]]:
        def rows(ids: tuple[bytes, ...]) -> NDArray[np.uint8]:
            return np.frombuffer(b"".join(ids), dtype=np.uint8).reshape(len(ids), -1)

        return {
            "scores_QN": self.scores_QN, "query_index_Q": self.query_index_Q, "train_index_N": self.train_index_N,
            "query_ids": rows(self.query_ids), "record_ids": rows(self.record_ids),
        }  # fmt: skip


def _digest(arrays: dict[str, NDArray[Any]]) -> str:
    state = hashlib.sha256(b"dataworth-scores-1\n")
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        state.update(f"{name}|{array.dtype.str}|{array.shape}\n".encode())
        state.update(array.tobytes())
    return state.hexdigest()
