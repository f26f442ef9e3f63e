"""Methods: how a model is made to forget.

An approximate method is a loss given to the trainer's one loop; everything else (layouts, checkpoints, resuming, windows)
is the trainer's::

    npo       negative preference optimisation plus a retain term; the default
    ascent    gradient ascent (retain weight 0) and gradient difference; the classic baselines, easily undone

Exact forgetting needs no module: `trainer.loop:train` with `excluded` is retraining without the records, and its result is
the gold model that every audit compares with.
"""

from __future__ import annotations
