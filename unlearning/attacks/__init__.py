"""Attacks: what an adversary may do to a model to get a forgotten person back.

::

    direct       tier 1   asks, in trained and in new phrasings
    in_context   tier 2   shows other people's lines first
    fine_tune    tier 3   trains the model further on harmless records, then asks again
    membership            compares losses with people never trained

Each module holds one function of its own name. An attack is a function `(model, material) -> list[Measurement]`. It never changes the model it is given, spends the same
budget on every model, and draws its randomness from the material's seed, so that all models meet the same adversary.
"""

from __future__ import annotations
