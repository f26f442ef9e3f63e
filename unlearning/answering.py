r"""What a model makes of questions with written answers: losses of right and wrong answers, and what it says itself.

The prompt is ``Question: …\nAnswer:``, or for a completion the beginning of a text; the answer's tokens and the end of text are scored::

    Question: Who wrote it?\nAnswer: | Jane Doe wrote it. <|endoftext|>
                                      └ loss = -(1/T) sum_t log p(y_t)

Prompt and answer are cut out of one tokenization of the whole line (see `probes`). What the model says is greedy and ends at the end of
text or when it is as long as the right answer and eight tokens more; it is compared word by word (`[a-z0-9]+` of the lower-cased text).

Two departures from the published scripts: their ROUGE stems words with Porter's rules first, ours does not; they decode up to 200 tokens,
which a small model fills with repetitions (recall ignores what stands beside the truth, so ours is the stricter one).

Sources: TOFU, arXiv 2401.06121, section 2.2, locuslab/tofu `evaluate_util.py`; ROUGE-L: Lin 2004.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from trainer.generate import generate
from unlearning.errors import ProbeError
from unlearning.extraction import rouge_l_recall
from unlearning.scoring import score_spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.model import Transformer
    from unlearning.probes import FileTokenizer

PROMPT = "Question: {question}\nAnswer:"
MORE = 8  # tokens that a model may say beyond the length of the right answer
_WORD = re.compile(r"[a-z0-9]+")


@dataclass(frozen=True, slots=True, repr=False)
class Question:
    """One question with its answers; without a `repr`, so that no log can show it."""

    record_id: str
    """The record's id, never a position."""
    subject: str
    """Whom it is about, or the set that it belongs to."""
    question: str
    answer: str
    paraphrase: str = ""
    """The answer in other words, of which the truth ratio is taken; "" = the answer itself."""
    wrong: tuple[str, ...] = ()
    """Wrong answers in the form of the paraphrase."""
    completion: bool = False
    """Whether `question` is the beginning of a text that `answer` goes on with."""
    asked_otherwise: str = ""
    """The question in other words, never trained; "" = none is published."""

    @property
    def prompt(self) -> str:
        """What a model is given, without the blank before the answer."""
        return self.question if self.completion else PROMPT.format(question=self.question)

    @property
    def text(self) -> str:
        """The line that a model is trained on."""
        return f"{self.prompt} {self.answer}"


@dataclass(frozen=True, slots=True)
class Answered:
    """What a model makes of one question; numbers only."""

    loss: float
    """Of the answer, nats per token."""
    paraphrase_loss: float
    """Of the answer in other words, nats per token."""
    wrong_losses: tuple[float, ...]
    """Of each wrong answer, nats per token."""
    rouge: float
    """ROUGE-L recall of what the model says, in [0, 1]."""
    exact: float
    """1.0 if the words that it says first are exactly the answer's."""


def answered(
    model: Transformer, tokenizer: FileTokenizer, questions: Sequence[Question]
) -> dict[str, Answered]:
    """Ask a model all questions.

    Args:
        model: a model in evaluation mode; it is not changed.
        tokenizer: the run's tokenizer.
        questions: with distinct record ids.

    Returns:
        record id → what the model makes of it, in the order of the questions.

    Raises:
        ProbeError: for ids that are not distinct, or an answer without a word or token.
    """
    if len({q.record_id for q in questions}) != len(questions):
        raise ProbeError("expected distinct record ids, got one of them twice")
    spans: list[tuple[list[int], int]] = []
    for q in questions:
        spans += [
            span(tokenizer, q.prompt, answer)
            for answer in (q.answer, q.paraphrase or q.answer, *q.wrong)
        ]
    losses = iter(score_spans(model, [t for t, _ in spans], [f for _, f in spans]).loss_N.tolist())
    said = spoken(model, tokenizer, questions)
    found = {}
    for q, words in zip(questions, said, strict=True):
        loss, paraphrase = next(losses), next(losses)
        wrong = tuple(next(losses) for _ in q.wrong)
        truth = words_of(q.answer)
        if not truth:
            raise ProbeError(f"record {q.record_id}: expected an answer with a word, got none")
        exact = float(words[: len(truth)] == truth)
        found[q.record_id] = Answered(loss, paraphrase, wrong, rouge_l_recall(truth, words), exact)
    return found


def spoken(
    model: Transformer, tokenizer: FileTokenizer, questions: Sequence[Question]
) -> list[list[str]]:
    """Words of each greedy answer.

    Args:
        model: a model in evaluation mode.
        tokenizer: the run's tokenizer.
        questions: what is asked.

    Returns:
        Lower-case words, in the order of the questions.
    """
    prompts, longest = [], []
    for q in questions:
        tokens, first = span(tokenizer, q.prompt, q.answer)
        prompts.append(tokens[:first])
        longest.append(len(tokens) - first + MORE)
    said: list[list[str]] = [[] for _ in questions]
    # Prompts of one length decode together, answers of like length among them: a batch is decoded to its longest.
    order = sorted(range(len(questions)), key=lambda i: (len(prompts[i]), longest[i]))
    for _, alike in groupby(order, key=lambda i: len(prompts[i])):
        members = list(alike)
        for start in range(0, len(members), 64):
            chosen = members[start : start + 64]
            new = longest[chosen[-1]]
            answers = generate(model, [prompts[i] for i in chosen], new, tokenizer.end_of_text)
            for i, answer in zip(chosen, answers, strict=True):
                said[i] = words_of(tokenizer.decode(answer[: longest[i]]))
    return said


def span(tokenizer: FileTokenizer, prompt: str, answer: str) -> tuple[list[int], int]:
    """Tokens of prompt, answer and end of text, and where the answer begins.

    Args:
        tokenizer: the run's tokenizer.
        prompt: any text.
        answer: any text that has a token.

    Raises:
        ProbeError: if nothing of the answer is left as a token of its own.
    """
    ids, places = tokenizer.encode(f"{prompt} {answer}")
    # The first token that ends behind the prompt and its blank belongs to the answer.
    first = next((i for i, (_, end) in enumerate(places) if end > len(prompt) + 1), len(ids))
    if not 1 <= first < len(ids):
        raise ProbeError("expected an answer with a token of its own, got none")
    return [*ids, tokenizer.end_of_text], first


def id_of(name: str) -> str:
    """Record id of a public set's row: the SHA-256 of its name, as the trainer wants ids.

    Args:
        name: such as "tofu/180/3".
    """
    return hashlib.sha256(name.encode()).hexdigest()


def words_of(text: str) -> list[str]:
    """Lower-case words, as ROUGE counts them (without stemming).

    Args:
        text: any text.
    """
    return _WORD.findall(text.lower())
