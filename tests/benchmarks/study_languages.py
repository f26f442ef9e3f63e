"""Owners of other languages: `make accept STUDY=owners-languages`. Translations of one program's messages, one owner per language.

Django's wheel carries its messages in a hundred languages (BSD-3-Clause). Owners are German, Dutch, Spanish, Russian, Ukrainian and the English
originals, each with the same 100 messages of at least 20 characters; two buyers want 60 other messages in German and in Russian. Values by
proxies of 0.08 (labelled 0.09M) and 0.4 million parameters, exact over all 64 coalitions, two seeds, in nats per target token. Bytes per token are of the
tokenizer that the proxies use (512 byte pairs, learnt from all six languages alike) and of one that was learnt from as many messages of English only.

The wheel is read where `pip download --no-deps -d FOLDER django==5.2.8` left it, FOLDER = `.dataworth-accept/studies/wheels`; another file is refused.
"""

import ast
import hashlib
import re
import zipfile
from dataclasses import replace

import numpy as np
from corpora import STATE
from figures import record
from owner_games import by_owner, play, said, stored
from setting import MODEL
from study_transfer import VOCAB, bpe, moved, rho

from valuation.entropy import empirical_entropy

WHEEL = STATE / "wheels" / "django-5.2.8-py3-none-any.whl"
SHA256 = "37e687f7bd73ddf043e2b6b97cfe02fcbb11f2dbb3adccc6a2b18c6daa054d7f"
LANGUAGES = ("en", "de", "nl", "es", "ru", "uk")
BUYERS = ("de", "ru")
RECORDS, QUERIES, SEEDS = 100, 60, (0, 1)
SPECS = {
    "0.09M": (replace(MODEL, vocab_size=VOCAB, dim=48, ffn_dim=128, tied=True), 4e-3),
    "0.4M": (replace(MODEL, vocab_size=VOCAB, num_layers=3, dim=96, ffn_dim=256, tied=True), 3e-3),
}
PACKAGES = ("torch", "numpy", "scipy", "tokenizers")
ENTRY = re.compile(r'^msgid ((?:".*"\n)+)msgstr ((?:".*"\n?)+)', re.MULTILINE)


def messages(language):
    """English message → its translation, of messages without plural forms.

    Raises:
        ValueError: another wheel than the pinned one.
    """
    if not WHEEL.exists() or hashlib.sha256(WHEEL.read_bytes()).hexdigest() != SHA256:
        raise ValueError(f"{WHEEL.name}: expected SHA-256 {SHA256[:16]}…; pip download --no-deps -d {WHEEL.parent} django==5.2.8")  # fmt: skip

    def joined(lines):
        return "".join(ast.literal_eval(line) for line in lines.splitlines())

    found = {}
    with zipfile.ZipFile(WHEEL) as wheel:
        for name in sorted(wheel.namelist()):
            if name.endswith(f"/locale/{language}/LC_MESSAGES/django.po"):
                for key, value in ENTRY.findall(wheel.read(name).decode()):
                    found.setdefault(joined(key), joined(value))
    return {key: value for key, value in found.items() if len(key) >= 20 and value}


def material():
    """(language, text) of records and of targets, and texts of every language for the tokenizers."""
    texts = {name: messages(name) for name in LANGUAGES if name != "en"}
    shared = set.intersection(*(set(t) for t in texts.values()))
    keys = sorted(shared, key=lambda key: hashlib.sha256(key.encode()).digest())
    texts["en"] = {key: key for key in keys}
    own, wanted, spare = (keys[:RECORDS], keys[RECORDS : RECORDS + QUERIES], keys[RECORDS + QUERIES :])  # fmt: skip
    rows = [(name, texts[name][key]) for name in LANGUAGES for key in own]
    target = [(name, texts[name][key]) for name in BUYERS for key in wanted]
    return rows, target, {name: [texts[name][key] for key in spare] for name in LANGUAGES}


def described(rows, coders):
    """Language → bytes per token of each tokenizer, and entropy in bits per token and per byte under the first."""
    table = {}
    for name in LANGUAGES:
        texts = [t for owner, t in rows if owner == name]
        size = sum(len(t.encode()) for t in texts)
        tokens = {label: np.concatenate([coder(t)[:-1] for t in texts]) for label, coder in coders.items()}  # fmt: skip
        ids = tokens["all"]
        bits = float(empirical_entropy(ids, np.array([0, len(ids)]), VOCAB).corrected_bits_N[0])
        table[name] = {f"bytes_per_token_{label}": size / len(t) for label, t in tokens.items()}
        table[name] |= {"bits_per_token": bits, "bits_per_byte": bits * len(ids) / size}
    return table


def tokenizers(spare):
    """Two tokenizers from equally many messages: of all languages, and of English."""
    mixed = [text for texts in spare.values() for text in texts[: len(texts) // len(spare)]]
    return {"all": bpe(mixed), "english": bpe(spare["en"])}


def facts():
    """Bytes per token and entropy of every language; trains nothing."""
    rows, _, spare = material()
    table = described(rows, tokenizers(spare))
    worst = min(table, key=lambda name: table[name]["bytes_per_token_english"])
    ratio = table["en"]["bytes_per_token_english"] / table[worst]["bytes_per_token_english"]
    figure(
        "bytes_per_token", ratio, None, "1", "none", None, "bytes per token of English over those of the worst language, with a tokenizer of English", spread="six languages, 100 messages each",
        table=table, note="; ".join(f"{n}: {r['bytes_per_token_all']:.2f} bytes per token (English tokenizer {r['bytes_per_token_english']:.2f}), {r['bits_per_token']:.2f} bits per token, {r['bits_per_byte']:.2f} per byte" for n, r in table.items()),
    )  # fmt: skip


def study():
    """Facts first, then both proxies and what they say of each other."""
    facts()
    rows, target, spare = material()
    found = stored("languages", rows, target, tokenizers(spare)["all"], VOCAB, VOCAB - 1)
    buyer_Q, member_KN = np.array([name for name, _ in target]), by_owner(rows, LANGUAGES)
    games = {name: play(found, member_KN, SEEDS, spec, lr) for name, (spec, lr) in SPECS.items()}
    margins, agree, shift, notes, table = [], [], [], [], {}
    for buyer in BUYERS:
        own, at = LANGUAGES.index(buyer), {name: game.at(buyer_Q == buyer) for name, game in games.items()}  # fmt: skip
        mean = {name: game.values_RK.mean(0) for name, game in at.items()}
        for name, game in at.items():
            lead_B = game.draws()[:, own] - np.delete(game.draws(), own, axis=1).max(1)
            margins.append((mean[name][own] - np.delete(mean[name], own).max(), *np.percentile(lead_B, [2.5, 97.5])))  # fmt: skip
            table[f"{buyer}, {name}"] = dict(zip(LANGUAGES, mean[name].tolist(), strict=True))
            notes.append(f"{buyer}, {name}: {said(LANGUAGES, mean[name], game.half_K())}")
        small, large = mean.values()
        agree.append(rho(small, large))
        shift.append(moved(small, large))
    lead = tuple(float(x) for x in min(margins, key=lambda m: m[1]))
    figure("own", lead[0], lead[1:], "nats per token", "low > 0", lead[1] > 0, "lead of the buyer's own language over the best other one, the worst of two buyers and two proxies", spread="bootstrap over target records and seeds", note="; ".join(notes), table=table)  # fmt: skip
    figure("sizes", min(agree), None, "1", ">= 0.8", min(agree) >= 0.8, "Spearman correlation of six owners' values from proxies of two sizes, the worse of two buyers", spread=f"two buyers: {agree[0]:.2f} and {agree[1]:.2f}")  # fmt: skip
    figure("moved", max(shift), None, "share", "<= 0.1", max(shift) <= 0.1, "share of the pool that changes hands between proxies of two sizes, the worse of two buyers", spread=f"two buyers: {shift[0]:.3f} and {shift[1]:.3f}")  # fmt: skip


def figure(name, estimate, ends, unit, bar, holds, what, **more):
    """A line of this study."""
    low, high = ends or (None, None)
    record(
        "accept.jsonl", f"valuation.owners.languages.{name}", packages=PACKAGES, kind="hypothesis", seeds=list(SEEDS), n=len(LANGUAGES), unit=unit, what=what,
        estimate=estimate, low=low, high=high, level=None if ends is None else 0.95, bar=bar, holds=holds, command="make accept STUDY=owners-languages",
        **{"note": "", **more},
    )  # fmt: skip
