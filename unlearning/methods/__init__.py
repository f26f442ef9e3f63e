"""Methods: how a model is made to forget. One small file each, with formula and source.

An approximate method is a loss given to the trainer's one loop; everything else (layouts, checkpoints, resuming, windows) is
the trainer's. `settings` is the one place of hyper-parameters, `view` what a loss may look at, `objective` what all of them share,
`spread` how a loss is computed where positions, vocabulary or depth are cut, `reference` what is kept of the original, `stopping` when a
run may end, `outcome` what it did.

============== ============================================= ===========================================
name           pushes                                        holds
============== ============================================= ===========================================
ascent         log p of the secret                           nothing
graddiff       log p                                         NLL of what remains
kl             log p                                         KL to the original on what remains
npo            log p, fading below the original              NLL
simnpo         log p per token, fading below a margin        NLL
dpo            "I don't know" over the secret                NLL
altpo          plausible alternates over the secret          NLL
rmu            hidden states to a random direction           hidden states of the original
adaptive_rmu   the same, scaled by the original's norm       hidden states of the original
undial         the original's logits minus the secret's      nothing
ceu            the model's own logits without the secret     nothing
wga            log p weighted by p                           NLL
satimp         log p weighted by p^a (1-p)^b                 NLL
pdu            logits to flat                                NLL below a bound, by a dual variable
rau            many layers to the mean state of all secrets  hidden states of the original
finetune       nothing                                       NLL
============== ============================================= ===========================================

Others are no losses: `sisa` (sharded exact retraining), `task_vector`, `newton` (influence step), `certified` (convex heads),
`coreset` (which records to push). Exact forgetting needs no module: `trainer.loop:train` with `excluded`.
"""

from __future__ import annotations

METHODS = (
    "adaptive_rmu", "altpo", "ascent", "ceu", "dpo", "finetune", "graddiff", "kl", "npo", "pdu", "rau", "rmu", "satimp",
    "simnpo", "undial", "wga",
)  # fmt: skip
"""Names that `unlearning.methods.objective:run` knows; each is a module with `loss` and `NEEDS`."""

EDITS = ("newton", "task_vector")
"""Names that `unlearning.methods.edits:run` knows. They stand here because who only asks for names needs no PyTorch."""
