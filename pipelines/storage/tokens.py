r"""Tokens: one tokenizer per corpus lineage, and the token folder of a version.

*Tokenizer.* Byte-level BPE, trained once with ``tokenizers`` on the records without the ``personal`` flag,
then frozen: nobody's phone number becomes a token. A text is first split by :data:`PATTERN` (the GPT-4
pattern with digits one by one, so that numbers are sequences, not vocabulary), then bytes are merged. Ids are
0..255 the bytes, then merges in the order learned, and last ``<|endoftext|>``. The same texts give the same
file, in any order and on any number of cores.

*Encoding* is done by ``tiktoken`` from the same ranks: same ids, about seven times faster, and no text can
spell the end-of-text token, because texts are encoded as ordinary ones.

*Token folders* are written by the trainer's own writer, 4,096 leaves a shard, with the subtree root of each
shard; :func:`check_tokens` decodes every document and compares it with the record.

Cost for 12 MB: 3 CPU seconds to train 2,048 tokens, 1.5 to encode.

Source: Sennrich, Haddow, Birch (2016), arXiv:1508.07909; byte-level alphabet of GPT-2.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pipelines.storage.archive import Archive
from pipelines.storage.blocks import SHARD_LEAVES
from pipelines.storage.errors import TokenizerError
from provenance.canonical import keyed, write_atomic
from provenance.hashing import sha256
from provenance.merkle import MerkleTree

if TYPE_CHECKING:
    import tiktoken

END_OF_TEXT: Final = "<|endoftext|>"
NUM_BYTES: Final = 256
PATTERN: Final = (
    r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_BATCH: Final = 1024


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A frozen tokenizer."""

    digest: str
    """Hex SHA-256 of its file."""
    vocab_size: int
    end_of_text: int
    """The last id, vocab_size - 1."""
    encoding: "tiktoken.Encoding"

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of some texts, without end-of-text.

        Args:
            texts: any texts; none can produce the end-of-text id.

        Returns:
            One list per text, 0 <= id < vocab_size - 1.
        """
        return self.encoding.encode_ordinary_batch(list(texts), num_threads=1)

    def decode(self, ids: Sequence[int]) -> str:
        """The text that token ids stand for.

        Args:
            ids: token ids; end-of-text ids are passed over.

        Returns:
            The text; bytes that are not UTF-8 (a cut-off character) become U+FFFD.
        """
        kept = [int(token) for token in ids if token != self.end_of_text]
        return self.encoding.decode(kept, errors="replace")


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: Path) -> Tokenizer:
    """Train the tokenizer of a corpus lineage and freeze it.

    Args:
        texts: records without the personal flag.
        vocab_size: wanted number of ids, >= 258; a small corpus may give fewer.
        path: where the file goes.

    Returns:
        The tokenizer, read back from its file.

    Raises:
        TokenizerError: the vocabulary is too small, there is no text, or another tokenizer is there.
        OSError: the disk refused.
    """
    if vocab_size < NUM_BYTES + 2:
        raise TokenizerError(f"vocab_size: expected at least {NUM_BYTES + 2}, got {vocab_size}")
    data = _train(texts, vocab_size)
    if path.exists() and path.read_bytes() != data:
        raise TokenizerError(
            "this corpus lineage has a tokenizer and it is frozen: models were trained with it. "
            "Load it, or begin a new home"
        )
    write_atomic(path, data)
    return load_tokenizer(path)


def load_tokenizer(path: Path, expected_digest: str | None = None) -> Tokenizer:
    """Read a tokenizer.

    Args:
        path: the file that :func:`train_tokenizer` wrote.
        expected_digest: hex SHA-256 that the file must have, or None to take what is there.

    Returns:
        The tokenizer.

    Raises:
        TokenizerError: missing, changed, or not one of ours.
    """
    import tiktoken

    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise TokenizerError(f"no tokenizer {path.name!r}: train one first") from None
    digest = sha256(data).hex()
    if expected_digest is not None and digest != expected_digest:
        raise TokenizerError(f"tokenizer: expected digest {expected_digest}, got {digest}")
    try:
        ranks = _ranks(json.loads(data))
    except (KeyError, TypeError, ValueError, IndexError):
        raise TokenizerError(
            f"{path.name} is not a tokenizer of this program: expected byte-level BPE over its own "
            f"pattern, with {END_OF_TEXT} as the last id"
        ) from None
    end = len(ranks)
    encoding = tiktoken.Encoding(
        f"dataworth-{digest[:12]}",
        pat_str=PATTERN,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: end},
        explicit_n_vocab=end + 1,
    )
    return Tokenizer(digest, end + 1, end, encoding)


def training_texts(archive: Archive, version: str) -> Iterator[str]:
    """The texts that a tokenizer may see: those without the personal flag.

    Args:
        archive: the home's archive.
        version: id of a version.

    Yields:
        Texts by index.
    """
    for _, rows in archive.iter_blocks(version, ["text", "personal"]):
        yield from rows.filter(~rows["personal"])["text"]


def write_version_tokens(archive: Archive, version: str, tokenizer: Tokenizer, folder: Path) -> str:
    """Write the token folder of a corpus version.

    Args:
        archive: the home's archive.
        version: id of a version.
        tokenizer: the frozen tokenizer.
        folder: where to, for instance HOME/tokens/ID.

    Returns:
        Hex digest of the folder's tokens.json.

    Raises:
        CorruptionError: a block or the leaves were changed.
        OSError: the disk refused.
    """
    from trainer.data import write_tokens
    from trainer.tokens import TOKENS_FILE, read_manifest

    # Runs name the digest of the folder that they were trained on: one that was written without a key stays as it was.
    keyless = (folder / TOKENS_FILE).exists() and "owner_key" not in read_manifest(folder)[0]
    tree = MerkleTree(archive.leaves(version))
    roots = [
        tree.subtree_root(first, min(SHARD_LEAVES, tree.size - first))
        for first in range(0, tree.size, SHARD_LEAVES)
    ]
    return write_tokens(
        folder,
        corpus_version=version,
        tokenizer_digest=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        records=_records(archive, version, tokenizer),
        subtree_roots=roots,
        owner_key=None if keyless else keyed(archive.keys.k_owner, b"owners of runs"),
    )


def check_tokens(
    archive: Archive, version: str, tokenizer: Tokenizer, folder: Path, digest: str
) -> int:
    """Check that the tokens of a folder are the texts of a version, every record of it.

    Args:
        archive: the home's archive.
        version: id of the version.
        tokenizer: the frozen tokenizer.
        folder: its token folder.
        digest: what :func:`write_version_tokens` returned.

    Returns:
        Number of tokens.

    Raises:
        TokenizerError: a document does not decode to its record, or belongs to another.
        DataError: the folder was changed (from the trainer).
    """
    from trainer.data import TokenStore

    store = TokenStore.open(folder, digest)
    if (store.corpus_version, store.tokenizer_digest) != (version, tokenizer.digest):
        raise TokenizerError("the token folder belongs to another corpus version or tokenizer")
    live = set(store.live_N.tolist())
    for _, rows in archive.iter_blocks(version, ["index", "record_id", "owner", "text"]):
        for index, record, owner, text in rows.iter_rows():
            ids = store.tokens(index).tolist() if index in live else [-1]
            if (
                store.record_id(index) != record
                or store.owner_of(index) != owner
                or ids[-1] != tokenizer.end_of_text
                or tokenizer.encoding.decode_bytes(ids[:-1]) != text.encode()
            ):
                raise TokenizerError(f"index {index}: the tokens do not stand for the record")
            live.discard(index)
    if live:
        raise TokenizerError(
            f"{len(live)} tombstoned records still have tokens: write the folder again"
        )
    return int(store.lengths_N.sum())


def _records(
    archive: Archive, version: str, tokenizer: Tokenizer
) -> Iterator[tuple[int, bytes | None, str | None, Sequence[int]]]:
    """Every leaf in order, as the trainer's writer wants it."""
    for block, rows in archive.iter_blocks(version, ["index", "record_id", "owner", "text"]):
        at = block.first
        for part in rows.iter_slices(_BATCH):
            ids = tokenizer.encode(part["text"].to_list())
            for (index, record, owner), tokens in zip(
                part.select("index", "record_id", "owner").iter_rows(), ids, strict=True
            ):
                yield from ((gap, None, None, ()) for gap in range(at, index))
                yield index, record, owner, [*tokens, tokenizer.end_of_text]
                at = index + 1
        yield from ((gap, None, None, ()) for gap in range(at, block.first + block.count))


def _train(texts: Iterable[str], vocab_size: int) -> bytes:
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Trainable

    trainable = Trainable(models.BPE())
    trainable.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainable.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
    )
    seen = False

    def watched() -> Iterator[str]:
        nonlocal seen
        for text in texts:
            seen = True
            yield text

    trainable.train_from_iterator(watched(), trainer)
    if not seen:
        raise TokenizerError("no text to train a tokenizer on: all records are personal")
    # Added after training, so that it takes the last id and the bytes keep the first 256.
    trainable.add_special_tokens([END_OF_TEXT])
    return str(trainable.to_str()).encode()


def _ranks(document: Any) -> dict[bytes, int]:
    """Bytes to rank from the JSON of ``tokenizers``; raises something of KeyError, TypeError, ValueError."""
    split, byte_level = document["pre_tokenizer"]["pretokenizers"]
    added = document["added_tokens"]
    vocabulary = document["model"]["vocab"]
    alphabet = _alphabet()
    ranks = {
        bytes(alphabet[letter] for letter in token): rank for token, rank in vocabulary.items()
    }
    if (
        split["pattern"] != {"Regex": PATTERN}
        or byte_level["type"] != "ByteLevel"
        or sorted(ranks.values()) != list(range(len(vocabulary)))
        or len(ranks) < NUM_BYTES
        or any(bytes([byte]) not in ranks for byte in range(NUM_BYTES))
        or [(token["content"], token["id"]) for token in added] != [(END_OF_TEXT, len(ranks))]
    ):
        raise ValueError("not a tokenizer of this program")
    return ranks


def _alphabet() -> dict[str, int]:
    """The printable letter that stands for each byte in the file.

    Printable bytes stand for themselves, the others for U+0100 and following, in order.

    Source: GPT-2, ``bytes_to_unicode``.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(NUM_BYTES) if byte not in set(printable)]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(NUM_BYTES + place): byte for place, byte in enumerate(others)}
