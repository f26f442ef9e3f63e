"""The practice setting: a pretrained model, fine-tuned on TOFU, LUME's people and ours, five methods, three tiers.

::

    scales      the numbers of a study: practice, and a smoke scale for the tests
    cast        who is forgotten, who stays, whom nobody ever saw, as questions with answers
    models      one pretrained model; from it original, gold models and every method, resumable
    forgetting  the methods' losses on the tokens of answers, as TOFU's own code has them
    audits      the pilot's audits with these questions
    benchmarks  TOFU's and LUME's numbers of one model, kept as numbers
    published   published ranks of the same methods, and how ours agree with them

`make accept STUDY=audit-practice` runs it. All people are made up, published or ours, so that their texts may be written to disk.
"""

from __future__ import annotations
