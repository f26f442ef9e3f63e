"""The last word on a model: its loss on `target_confirm`, which is opened once for a plan, after everything is decided.

Value, choice and threshold were all taken by looking at `target_value` and `target_test`; a number that was looked at while choosing is
too good. So a quarter of the target lies sealed. Opening is entered in the ledger *before* it happens: whoever opens and dislikes what
is there cannot say that nobody looked. A command that was killed before its number came may look again, at the same model; the ledger
knows that no number came. The texts are tokenised in memory and stay nowhere.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelines.steps.ledger import corpus_keys, enter, open_ledger

if TYPE_CHECKING:
    from pipelines.results import Result
    from pipelines.site import Site


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What the sealed part says of the released model."""

    loss: float
    """Nats per token."""
    se: float
    """Standard error of the loss, records as the sampling unit."""
    gain: float
    """Unigram baseline less loss."""
    gain_se: float
    """Its standard error."""
    threshold: float
    """Gain that the plan asks for."""
    records: int
    """Records of the sealed part."""
    entry: int
    """Ledger entry of the result."""

    @property
    def holds(self) -> bool:
        """Whether the plan's threshold holds here too."""
        return self.gain >= self.threshold


def confirm(site: "Site", plan: "Result", tokens: "Result", checkpoint: "Result") -> Confirmation:
    """Open the sealed part for a plan and measure the released model on it.

    Args:
        site: The open home.
        plan: The evaluation plan.
        tokens: The training tokens; their frequencies are the baseline.
        checkpoint: The released model.

    Raises:
        TargetError: Opened for this plan already, or not there, or changed.
        CheckpointError: The model is not the one named.
    """
    from pipelines.evaluate import measure
    from pipelines.storage.errors import TargetError
    from pipelines.storage.target import open_confirm
    from pipelines.storage.tokens import load_tokenizer
    from trainer import TokenStore
    from unlearning.ensemble import load

    tokenizer = load_tokenizer(site.home.tokenizer_path, tokens["tokenizer_digest"])
    training = TokenStore.open(site.home.path / tokens["folder"], tokens["digest"])
    shape = site.size.model.shape(tokens["vocab_size"])
    model = load(site.home.path / checkpoint["checkpoint"], shape, checkpoint["root"])
    about = {"plan": plan["digest"], "checkpoint": checkpoint["root"]}
    with site.home.lock("confirm"):
        before = [one["body"] for one in open_ledger(site).entries() if one["kind"] == "confirm"]
        of_plan = [body for body in before if body["plan"] == plan["digest"]]
        unfinished = bool(of_plan) and all(body == about | {"state": "opened"} for body in of_plan)
        if of_plan and not unfinished:
            raise TargetError(
                f"target_confirm was opened for plan {plan['digest'][:12]} already, for model {of_plan[0]['checkpoint'][:12]}: a "
                "confirmation is looked at once; commit a new plan with a reason"
            )
        # First of all what can fail without having looked, then the entry, then the look.
        enter(site, "confirm", about | {"state": "opened"})
        frame = open_confirm(site.home, corpus_keys(site), plan["digest"], unfinished=unfinished)
        encoded = [
            [*ids, tokenizer.end_of_text] for ids in tokenizer.encode(frame["text"].to_list())
        ]
        found = measure(
            model,
            [ids for ids in encoded if len(ids) > 1],
            training,
            site.size.rows,
            site.size.length,
        )
        entry = enter(
            site, "confirm",
            about | {
                "state": "measured", "loss_micronats": round(found["loss"] * 1e6), "baseline_micronats": round(found["baseline"] * 1e6),
                "records": found["records"],
            },
        )  # fmt: skip
    return Confirmation(
        found["loss"], found["se"], found["baseline"] - found["loss"], found["gain_se"],
        plan["threshold_millinats"] / 1000, found["records"], entry,
    )  # fmt: skip
