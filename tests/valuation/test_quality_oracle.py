"""Quality by array arithmetic equals the slow and obvious way: regular expressions, one Python object per token."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from valuation import TokensError, text_quality, token_hashes
from valuation import quality as module
from valuation.characters import (
    DAMAGED,
    MAX_BLOCKS,
    MOVING,
    PLANE,
    ascii_characters,
    find_tokens,
    kinds_below,
    kinds_of,
    text_bytes,
    text_codes,
    unicode_characters,
)
from valuation.quality import stream_quality
from valuation.shingles import normalised

WORDS = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]|\w+|[^\w\s]"
DAMAGE = r"[\p{Cc}\p{Co}\x{FFFD}--\t\n\r\x0C]"
MOJIBAKE = r"[ÂÃ][\x{80}-\x{BF}]|â€[\x{80}-\x{2122}]"
NAMES = ("damaged_N", "repeated_N", "runs_N", "distinct_N", "packed_N", "score_N")
SPACES = " \t\n\r\f\u00a0\u3000"
# Everything that could go wrong: letters whose lower case or normal form depends on neighbours (sigma, jamo, marks, ligatures, full
# width, İ), scripts without spaces within words, planes above the first, control and format characters, broken encodings.
ODDITIES = [
    *"aA1_ -=.\n\t\x00\x0b\x0c\x1c\x7f\x85\u00a0\u2028\u3000", *"éÉßẞİıΣσςǅﬁ²½Ⅷ", "e\u0301", "\u0301", "\u200d", "\u200b", "\ufeff", "\u00ad",
    *"東京都a々\u3007ーァあ⺀ไทยกำລາວខ្မြမာ", "\u1112\u1161\u11ab", "한", *"हिन्दी", *"العربية", *"😀𝔸𐐀𠀋", "\U00016d67\U00016d67", "\ue000", "\ufffd",
    "Ã©", "â€œ", "Â\u00a0", "â€Ã\u0080", "â€â€œ", "aaaaaaaaaaaa", "==========", "东东东东东东东东东东东", "          ", "a b c d e f g h ", "Word word WORD ",
]  # fmt: skip
TEXT = st.lists(st.sampled_from(ODDITIES), max_size=60).map("".join) | st.text(max_size=40)


def obvious(text):
    """Damaged, repeated, runs and distinct of one text, by definition."""
    series = pl.Series([text])
    damaged = series.str.count_matches(DAMAGE)[0] + 2 * series.str.count_matches(MOJIBAKE)[0]
    in_runs, at = 0, 0
    while at < len(text):
        end = at
        while end < len(text) and text[end] == text[at]:
            end += 1
        in_runs += (end - at) * (end - at >= 10 and text[at] not in SPACES)
        at = end
    clean = series.str.normalize("NFKC").str.replace_all(r"\p{Cf}", "").str.to_lowercase()
    tokens = clean.str.extract_all(WORDS)[0].to_list()
    runs = [tuple(tokens[i : i + 8]) for i in range(max(len(tokens) - 7, 1))]
    return (
        min(damaged / max(len(text), 1), 1.0),
        1 - len(set(runs)) / len(runs),
        in_runs / max(len(text), 1),
        len(set(tokens)) / len(tokens) if tokens else 1.0,
    )


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(TEXT, max_size=5))
@example(texts=["", "", "a", ""])
@example(texts=["a東京b", "東a京", "東京", "กa", "ΑΣ ΑΣ. ας"])
@example(
    texts=[
        "\u1112\u1161 하",
        "\u1112\u1161\u11ab 한",
        "e\u0301 é",
        "\U00016d67\U00016d67 \U00016d68",
        "a\u200bb ab",
    ]
)
@example(texts=["x " * 20, "東" * 40, "a b c d e f g h " * 3 + "i"])
def test_every_component_equals_its_definition(texts):
    """Damaged, repeated, runs and distinct are equal, for whatever characters and neighbours."""
    found = text_quality(texts)
    expected = np.array([obvious(text) for text in texts]).reshape(len(texts), 4)
    for column, name in enumerate(("damaged_N", "repeated_N", "runs_N", "distinct_N")):
        assert getattr(found, name) == pytest.approx(expected[:, column], abs=1e-12), name


def tokens_of(texts):
    """Tokens of a series that is read as code points."""
    return find_tokens(unicode_characters(*text_codes(texts))[0])


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(TEXT, min_size=1, max_size=4))
def test_the_tokens_are_those_of_shingles(texts):
    """As many tokens in each text as the regular expression finds, and equal ones have equal hashes, different ones different hashes."""
    slow_W, length_N = token_hashes(texts)
    tokens = tokens_of(normalised(pl.Series(texts, dtype=pl.String)))
    assert tokens.length_N.tolist() == length_N.tolist()
    pairs = set(zip(slow_W.tolist(), tokens.hash_W.tolist(), strict=True))
    assert len(pairs) == len(set(slow_W.tolist())) == len(set(tokens.hash_W.tolist()))


def test_every_character_of_the_basic_plane_and_of_the_next_is_cut_like_the_regular_expression():
    """Each character alone between two letters and two spaces: exhaustive, not sampled."""
    codes = np.concatenate([np.arange(0xD800), np.arange(0xE000, 2 * PLANE)])
    texts = pl.Series([f"x{chr(code)}y {chr(code)} z" for code in codes.tolist()])
    clean = normalised(texts)
    expected = clean.str.count_matches(WORDS).to_numpy()
    flag = kinds_of(codes.astype(np.uint32)).flag_K
    assert (kinds_below(2).flag_K[codes] == flag).all()
    some = (flag & MOVING) > 0
    assert (tokens_of(clean).length_N == expected).all()
    assert (tokens_of(texts).length_N == expected)[~some].all()
    assert some.mean() < 0.2
    assert not some[:128].any()
    assert (((flag & DAMAGED) > 0) == texts.str.contains(DAMAGE).to_numpy()).all()


def test_ascii_without_a_table_is_ascii_by_the_table():
    """Every pair of ASCII characters: the comparisons of bytes find the lower case, spaces and beginnings that the regular expressions do."""
    texts = pl.Series([chr(a) + chr(b) for a in range(128) for b in range(128)] + ["", "A a", ""])
    fast, (slow, _) = (
        ascii_characters(*text_bytes(texts)),
        unicode_characters(*text_codes(texts)),
    )
    for name in ("lower_C", "start_C", "border_N1"):
        assert (getattr(fast, name) == getattr(slow, name)).all(), name
    assert (fast.lower_C.dtype, slow.lower_C.dtype) == (np.uint8, np.uint16)


@pytest.mark.parametrize("letters", ["abc", "aßя", "a𐐨b"])
def test_a_token_of_any_length_has_its_own_hash_wherever_it_stands(letters):
    """Around every block's border and far beyond the last one, before any number of spaces: equal if and only if equal."""
    rng = np.random.default_rng(0)
    lengths = [
        1,
        2,
        3,
        4,
        5,
        7,
        8,
        9,
        15,
        16,
        17,
        63,
        64,
        65,
        127,
        128,
        129,
        8 * MAX_BLOCKS + 5,
        700,
    ]
    words = ["".join(letters[i] for i in rng.integers(0, 3, size)) for size in lengths]
    words += [word[:-1] + "z" for word in words] + [word + "z" for word in words] + ["\x00"]
    text = "".join(word + " " * int(rng.integers(1, 300)) for word in words * 3)
    tokens = tokens_of(pl.Series([text]))
    assert tokens.length_N.tolist() == [3 * len(words)]
    names = dict(zip(words * 3, tokens.hash_W.tolist(), strict=True))
    assert [names[word] for word in words * 3] == tokens.hash_W.tolist()
    assert len(set(names.values())) == len(names) == len(set(words))


def test_neither_pieces_nor_threads_change_a_number(monkeypatch):
    """Pieces of any size, batches that come one by one, threads and a polars series give the same bytes."""
    rng = np.random.default_rng(0)
    texts = [
        "".join(ODDITIES[i] for i in rng.integers(0, len(ODDITIES), 80))
        if rng.random() < 0.5
        else f"plain text {rng.integers(0, 9)} " * int(rng.integers(0, 30))
        for _ in range(60)
    ]
    whole = text_quality(texts)
    series = pl.Series(texts)
    for size in (1, 300, 1 << 20):
        monkeypatch.setattr(module, "PIECE_BYTES", size)
        cuts = sorted({0, 60, *rng.integers(0, 60, 5).tolist()})
        batches = [series[a:b] for a, b in pairwise(cuts)]
        for other in (
            text_quality(texts),
            text_quality(series, threads=2),
            stream_quality(iter(batches), threads=3),
        ):
            for name in NAMES:
                assert (getattr(whole, name) == getattr(other, name)).all(), (name, size)


def test_the_oracle_can_tell(monkeypatch):
    """Negative control: with runs of nine characters the equality goes red."""
    texts = ["a" * 9 + " b"]
    assert text_quality(texts).runs_N[0] == obvious(texts[0])[2] == 0
    monkeypatch.setattr(module, "RUN_CHARACTERS", 9)
    assert text_quality(texts).runs_N[0] != obvious(texts[0])[2]


def test_batches_are_asked_for_as_they_are_needed(monkeypatch):
    """Larger than memory: with two threads no more than five pieces are waiting, however many batches there are."""
    taken, done = [], []
    real = module._piece_quality
    monkeypatch.setattr(
        module, "_piece_quality", lambda piece: done.append(real(piece)) or done[-1]
    )

    def batches():
        for number in range(40):
            taken.append(number - len(done))
            yield pl.Series([f"text {number}"])

    assert len(stream_quality(batches(), threads=2).score_N) == 40
    assert max(taken) <= 6


def test_fewer_threads_than_one_and_texts_that_are_none_are_refused():
    """A bad number is named, and a null is no empty text."""
    with pytest.raises(TokensError, match="at least 1, got 0"):
        text_quality(["a"], threads=0)
    with pytest.raises(TokensError, match="got 1 nulls"):
        text_quality(pl.Series(["a", None]))
