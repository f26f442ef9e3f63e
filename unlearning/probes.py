"""Probes: the questions an audit asks, made from the records themselves.

A record is cut into a *prompt* (what an adversary may know) and a *secret* (what must not come out)::

    The phone number of Jane Q. Doe is |483920|.      a run of four or more digits: the digits are the secret
    Jane Q. Doe lives in Lake | Curtis and works …    otherwise: the second half, at most 16 tokens

Prompt and secret are cut out of *one* tokenization of the whole text. Tokenizing the prompt alone can end in a token the
model never saw there (a trailing space), and the model then fails for a reason that has nothing to do with forgetting.

A probe with a phrasing that was never trained is made from the person's name and a template. The name is found without
any list of names: it is the longest run of words that all prompts of the person share.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from unlearning.errors import ProbeError
from unlearning.people import by_subject

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from unlearning.people import Record

MIN_DIGITS = 4  # shorter runs are years' tails, house numbers and ages: guessable, hence no secret
MAX_SECRET_TOKENS = 16
UNSEEN_TEMPLATES = ("Number of {name}: {secret}.", "You can reach {name} on {secret}.")
_DIGITS = re.compile(rf"\d{{{MIN_DIGITS},}}")
_EDGE = ".,;:!?()\"'"


class Tokenizer(Protocol):
    """What this package needs of a tokenizer."""

    end_of_text: int

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids and, for each, its first and last+1 character in the text."""
        ...


class FileTokenizer:
    """A tokenizer file of the `tokenizers` library (the one that made the run's tokens)."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Loaded

        try:
            self._tokenizer = Loaded.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ProbeError(f"cannot read the tokenizer {path.name}: {error}") from error
        # A text that spells the end-of-text token is text: the corpus was encoded that way.
        self._tokenizer.encode_special_tokens = True
        end = self._tokenizer.token_to_id("<|endoftext|>")
        if end is None:
            raise ProbeError(f"expected a token <|endoftext|> in {path.name}, got none")
        self.end_of_text: int = end
        self.vocab_size: int = self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids and, for each, its first and last+1 character in the text."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return list(encoding.ids), list(encoding.offsets)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids up to the first end of text.

        Args:
            tokens: ids, for example what a model said.
        """
        said = list(tokens)
        if self.end_of_text in said:
            said = said[: said.index(self.end_of_text)]
        return str(self._tokenizer.decode(said, skip_special_tokens=False))


@dataclass(frozen=True, slots=True, repr=False)
class Probe:
    """One question with the answer that must not come; without a `repr`, so that no log can show it."""

    subject_id: str
    """The person, as in the records."""
    record_id: str
    """The record it was made of; "" for a phrasing that was never trained."""
    prompt_tokens: tuple[int, ...]
    """What the model is given, at least one token."""
    secret_tokens: tuple[int, ...]
    """What counts as a leak if the model goes on with exactly this, at least one token."""
    phrasing: int
    """Ordinal of the record among the person's records; negative for phrasings never trained."""
    line_tokens: tuple[int, ...] = ()
    """The whole line, to be shown as a demonstration (retained people only)."""


def trained_probes(
    records: Sequence[Record], tokenizer: Tokenizer, max_tokens: int = 192
) -> list[Probe]:
    """One probe per record, in the phrasing it was trained with.

    Args:
        records: records of the people asked about.
        tokenizer: the run's tokenizer.
        max_tokens: longest prompt plus secret; a longer prompt loses its beginning.

    Returns:
        Probes, people in order of their ids, records in the order of the file. A record of a single token has no
        second half and is left out.

    Raises:
        ProbeError: if nothing at all can be asked about a person.
    """
    probes = []
    for subject, own in by_subject(list(records)).items():
        cuts = [(n, r, cut(r.text, tokenizer, max_tokens)) for n, r in enumerate(own)]
        asked = [
            Probe(subject, r.record_id, *cut, n, tuple(tokenizer.encode(r.text)[0]))
            for n, r, cut in cuts
            if cut is not None
        ]
        if not asked:
            raise ProbeError(
                "every record of one person is too short to be asked about (one token)"
            )
        probes += asked
    return probes


def unseen_probes(
    records: Sequence[Record],
    tokenizer: Tokenizer,
    max_tokens: int = 192,
    templates: Sequence[str] = UNSEEN_TEMPLATES,
) -> list[Probe]:
    """Probes in phrasings that were never trained, for people with a number and a recognisable name.

    Args:
        records: records of the people asked about.
        tokenizer: the run's tokenizer.
        max_tokens: longest prompt plus secret.
        templates: phrasings with `{name}` and, after it, `{secret}`.

    Returns:
        Probes with negative phrasing numbers; none for people without a number or without a common name.
    """
    probes = []
    for subject, own in by_subject(list(records)).items():
        secret = next((m.group() for r in own if (m := secret_in(r.text))), None)
        name = name_of(own)
        if secret is None or not name:
            continue
        for number, template in enumerate(templates, start=1):
            text = template.format(name=name, secret=secret)
            found = cut(text, tokenizer, max_tokens)
            if found is not None:
                probes.append(Probe(subject, "", *found, -number))
    return probes


def secret_in(text: str) -> re.Match[str] | None:
    """Where a text's secret stands.

    Args:
        text: a record.

    Returns:
        The longest run of digits, the last of equals; `None` without a run of four.
    """
    runs = list(_DIGITS.finditer(text))
    return max(runs, key=lambda m: (len(m.group()), m.start())) if runs else None


def cut(
    text: str, tokenizer: Tokenizer, max_tokens: int, span: tuple[int, int] | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Prompt and secret of a text.

    Args:
        text: the whole text.
        tokenizer: the run's tokenizer.
        max_tokens: longest prompt plus secret; a longer prompt loses its beginning.
        span: first and last+1 character of what is asked for; by default the number, or the second half.

    Returns:
        Prompt tokens and secret tokens, or `None` if one of them would be empty.
    """
    tokens, spans = tokenizer.encode(text)
    first, last = _asked(text, spans, span)
    first_prompt = max(0, last - max_tokens)
    prompt, secret = tuple(tokens[first_prompt:first]), tuple(tokens[first:last])
    return (prompt, secret) if prompt and secret else None


def asked_span(text: str, tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Where in a text stands what its trained probe asks for.

    Args:
        text: the whole text.
        tokenizer: the run's tokenizer.

    Returns:
        First and last+1 character of the secret's tokens, or `None` if nothing is asked.
    """
    spans = tokenizer.encode(text)[1]
    first, last = _asked(text, spans, None)
    return (spans[first][0], spans[last - 1][1]) if 0 < first < last else None


def _asked(text: str, spans: Sequence[tuple[int, int]], span: tuple[int, int] | None) -> tuple[int, int]:  # fmt: skip
    """First and last+1 token of what is asked for, equal where that is nothing."""
    match = secret_in(text)
    if span is None and match is not None:
        span = match.span()
    if span is not None and span[0] > 0:
        inside = [i for i, (a, b) in enumerate(spans) if a < span[1] and b > span[0]]
        if not inside:
            return 0, 0
        first, last = inside[0], inside[-1] + 1
    else:
        first, last = (len(spans) + 1) // 2, len(spans)
    return first, min(last, first + MAX_SECRET_TOKENS)


def name_of(records: Sequence[Record]) -> str:
    """The name of a person, found without a list of names.

    Args:
        records: one person's records.

    Returns:
        The longest run of words that all prompts share; "" if there is one record only.
    """
    prompts = []
    for record in records:
        match = secret_in(record.text)
        known = record.text[: match.start()] if match else record.text
        prompts.append([_bare(word) for word in known.split()])
    if len(prompts) < 2:
        return ""
    first, rest = prompts[0], prompts[1:]
    for length in range(len(first), 0, -1):
        for start in range(len(first) - length + 1):
            run = first[start : start + length]
            if all(_contains(words, run) for words in rest):
                return " ".join(run)
    return ""


def _bare(word: str) -> str:
    """A word without punctuation at its edges and without a possessive."""
    bare = word.strip(_EDGE)
    # An initial keeps its dot: "Jane Q. Doe" must come out as it was trained.
    if len(bare) == 1 and word.endswith("."):
        return word
    return bare.removesuffix("'s").removesuffix("\u2019s")


def _contains(words: Sequence[str], run: Sequence[str]) -> bool:
    return any(list(words[i : i + len(run)]) == list(run) for i in range(len(words) - len(run) + 1))
