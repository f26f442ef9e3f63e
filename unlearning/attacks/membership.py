"""Membership inference: are the forgotten people still less surprising than people who were never trained?

Score of a record: its mean loss over all tokens. Forgotten people against look-alikes (same generator, never trained)
gives an AUC per model; the audit compares it with gold's, *both ways*: a model that is suspiciously surprised by the
forgotten people has not forgotten them either. A model can pass all three tiers and fail here: the secret is no longer
the first answer, but still one of the first hundred.

Source: loss attack, Yeom et al., CSF 2018, arXiv 1709.01604; two-sided reading: MUSE's PrivLeak, arXiv 2407.06460.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unlearning.rows import Measurement
from unlearning.scoring import score_spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.model import Transformer
    from unlearning.material import Document, Material


def membership(model: Transformer, material: Material) -> list[Measurement]:
    """Losses of forgotten people's and of look-alikes' records.

    Args:
        model: the model under attack, not changed.
        material: records.

    Returns:
        One measurement `loss` (nats per token) per record; none without look-alikes.
    """
    if not material.lookalikes:
        return []
    forgotten = losses(model, material.forgotten, "forgotten", "membership")
    return forgotten + losses(model, material.lookalikes, "lookalike", "membership")


def losses(
    model: Transformer, documents: Sequence[Document], population: str, attack: str
) -> list[Measurement]:
    """Mean loss of each document.

    Args:
        model: any model, not changed.
        documents: records with their end-of-text token.
        population: forgotten, retained or lookalike.
        attack: name that the measurements carry.

    Returns:
        One measurement `loss` per document of two or more tokens, nats per token.
    """
    scored = [d for d in documents if len(d.tokens) > 1]
    values = score_spans(model, [d.tokens for d in scored], [1] * len(scored)).loss_N
    asked: dict[str, int] = {}
    measured = []
    for document, value in zip(scored, values, strict=True):
        number = asked.get(document.subject, 0)
        asked[document.subject] = number + 1
        measured.append(
            Measurement(document.subject, population, number, attack, "loss", float(value))
        )
    return measured
