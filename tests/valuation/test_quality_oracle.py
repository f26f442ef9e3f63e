"""Quality by array arithmetic equals the slow and obvious way: regular expressions, one Python object per token."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from valuation import TokensError, text_quality, token_hashes
from valuation import quality as module
from valuation.characters import (
    BASIC,
    MARK,
    SPACE,
    ascii_codes,
    find_tokens,
    kinds_of,
    powers,
    unicode_codes,
)
from valuation.shingles import normalised

WORDS = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]|\w+|[^\w\s]"
SPACES = " \t\n\r\f\u00a0\u3000"
# Everything that could go wrong: letters whose lower case or normal form depends on neighbours (sigma, jamo, marks, ligatures, full
# width, İ), scripts without spaces within words, planes above the first, control and format characters, broken encodings.
ODDITIES = [
    *"aA1_ -=.\n\t\x00\x0b\x0c\x1c\x7f\x85\u00a0\u2028\u3000", *"éÉßẞİıΣσςǅﬁ²½Ⅷ", "e\u0301", "\u0301", "\u200d", "\u200b", "\ufeff", "\u00ad",
    *"東京都a々\u3007ーァあ⺀ไทยกำລາວខ្မြမာ", "\u1112\u1161\u11ab", "한", *"हिन्दी", *"العربية", *"😀𝔸𐐀𠀋", "\U00016d67\U00016d67", "\ue000", "\ufffd",
    "Ã©", "â€œ", "Â\u00a0", "aaaaaaaaaaaa", "==========", "东东东东东东东东东东东", "          ", "a b c d e f g h ", "Word word WORD ",
]  # fmt: skip
TEXT = st.lists(st.sampled_from(ODDITIES), max_size=60).map("".join) | st.text(max_size=40)


def obvious(text):
    """Damaged, repeated, runs and distinct of one text, by definition."""
    series = pl.Series([text])
    damaged = series.str.count_matches(module._DAMAGE)[0]
    damaged += 2 * series.str.count_matches(module._MOJIBAKE)[0]
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


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(TEXT, min_size=1, max_size=4))
def test_the_tokens_are_those_of_shingles(texts):
    """As many tokens in each text as the regular expression finds, and equal ones have equal hashes, different ones different hashes."""
    slow_W, length_N = token_hashes(texts)
    tokens = find_tokens(*unicode_codes(normalised(pl.Series(texts, dtype=pl.String)).to_list()))
    assert tokens.length_N.tolist() == length_N.tolist()
    pairs = set(zip(slow_W.tolist(), tokens.hash_W.tolist(), strict=True))
    assert len(pairs) == len(set(slow_W.tolist())) == len(set(tokens.hash_W.tolist()))


def test_every_character_of_the_basic_plane_and_of_the_next_is_cut_like_the_regular_expression():
    """Each character alone between two letters and two spaces: exhaustive, not sampled."""
    codes = np.concatenate([np.arange(0xD800), np.arange(0xE000, 2 * BASIC)])
    texts = [f"x{chr(code)}y {chr(code)} z" for code in codes.tolist()]
    clean = normalised(pl.Series(texts, dtype=pl.String))
    expected = clean.str.count_matches(WORDS).to_numpy()
    some = kinds_of(codes.astype(np.uint32)).moving_K
    whole = find_tokens(*unicode_codes(clean.to_list())).length_N
    assert (whole == expected).all()
    direct = find_tokens(*unicode_codes(texts)).length_N
    assert (direct == expected)[~some].all()
    assert some.mean() < 0.2
    assert not some[:128].any()


def test_ascii_and_code_points_find_the_same_tokens():
    """The fast way for bytes and the general one agree to the bit."""
    texts = ["def f(x):\n    return x ** 2  # Square\n", "", "A a", "\x00\x7f"]
    plain, general = find_tokens(*ascii_codes(texts)), find_tokens(*unicode_codes(texts))
    assert plain.hash_W.tolist() == general.hash_W.tolist()
    assert plain.length_N.tolist() == general.length_N.tolist()
    known = kinds_of(np.array([32, 65, 97, 46], np.uint32))
    assert known.kind_K.tolist()[0] == SPACE
    assert known.kind_K.tolist()[3] == MARK
    assert known.value_K[1] == known.value_K[2]
    assert known.value_K[0] == 0


def test_powers_are_inverse_to_each_other_at_any_length():
    """M^k times its inverse is 1 mod 2^64, for kept tables and longer ones."""
    for count in (0, 1, 2, 1000, (1 << 20) + 5):
        assert len(powers(count)) == count
        assert (powers(count) * powers(count, inverse=True) == 1).all()


def test_neither_pieces_nor_threads_change_a_number(monkeypatch):
    """Small pieces, one piece, two threads and a polars series give the same bytes."""
    rng = np.random.default_rng(0)
    texts = [
        "".join(ODDITIES[i] for i in rng.integers(0, len(ODDITIES), 80))
        if rng.random() < 0.5
        else f"plain text {rng.integers(0, 9)} " * int(rng.integers(0, 30))
        for _ in range(60)
    ]
    whole = text_quality(texts)
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 300)
    for other in (text_quality(texts), text_quality(pl.Series(texts), threads=2)):
        for name in ("damaged_N", "repeated_N", "runs_N", "distinct_N", "packed_N", "score_N"):
            assert (getattr(whole, name) == getattr(other, name)).all(), name


def test_the_oracle_can_tell(monkeypatch):
    """Negative control: with runs of nine characters the equality goes red."""
    texts = ["a" * 9 + " b"]
    assert text_quality(texts).runs_N[0] == obvious(texts[0])[2] == 0
    monkeypatch.setattr(module, "RUN_CHARACTERS", 9)
    assert text_quality(texts).runs_N[0] != obvious(texts[0])[2]


def test_fewer_threads_than_one_are_refused():
    """A bad number is named."""
    with pytest.raises(TokensError, match="at least 1, got 0"):
        text_quality(["a"], threads=0)
