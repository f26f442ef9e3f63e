"""Encoding speed of the frozen tokenizer: tiktoken from our ranks against tokenizers with the same file.

`pipelines.tokens.encode`: CPU seconds to encode 200 records of 2,000 characters, by turns in one process, median of five
rounds; the ids must be equal, which decides; the timing is printed and kept and decides nothing.
"""

import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
import figures  # noqa: E402 - after the path is set


def main():
    """The same ids as `tokenizers`, several times faster."""
    from tokenizers import Tokenizer

    from pipelines.storage.demo import speeches
    from pipelines.storage.records import paragraphs
    from pipelines.storage.tokens import train_tokenizer

    texts = [text for speech in speeches() for text in paragraphs(speech.text)][:1000:5]
    folder = Path(tempfile.mkdtemp())
    ours = train_tokenizer(texts, 2048, folder / "tokenizer.json")
    peer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert ours.encode(texts) == [encoding.ids for encoding in peer.encode_batch(texts)]
    rounds = []
    for _ in range(5):
        start = time.process_time()
        ours.encode(texts)
        middle = time.process_time()
        peer.encode_batch(texts)
        rounds.append((middle - start, time.process_time() - middle))
    mine, theirs = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratios = sorted(a / b for a, b in rounds)
    figures.record(
        "bench.jsonl", "pipelines.tokens.encode", packages=("tiktoken", "tokenizers"), what="encoding 200 records with the frozen tokenizer",
        unit="CPU s", kind="hypothesis", ours=mine, peer=theirs, peer_name="tokenizers", peer_version=version("tokenizers"),
        ratio=mine / theirs, better="lower", n=5, spread=f"{ratios[0]:.2f}..{ratios[-1]:.2f}", seeds=[], bar="ratio <= 0.5",
        holds=mine / theirs <= 0.5, command="make bench", note="equal ids on every record",
    )  # fmt: skip


if __name__ == "__main__":
    main()
