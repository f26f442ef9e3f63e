"""What a sweep has chosen for a method, as the graph's unlearning run takes it: rate, numbers, pushed tokens, neighbours."""

from typing import TYPE_CHECKING, Any

from pipelines.erasure.choosing import CORE_SET, CORE_SHARE
from pipelines.steps.tables import token_store
from unlearning.methods import EDITS

if TYPE_CHECKING:
    from pipelines.results import Result
    from pipelines.site import Site
    from unlearning.methods.settings import Swept

UNLEARN_LR = "0.001"
"""Peak rate of a method that no sweep has looked at (`unlearning.methods.settings.SWEPT`)."""


def swept(method: str) -> "Swept":
    """A method's rate and in what it differs from its published defaults, chosen on validation people where a sweep was run."""
    from unlearning.methods.settings import SWEPT, Swept

    return SWEPT.get("npo" if method == CORE_SET else method, Swept(UNLEARN_LR, {}, {}))


def settings_in_run(method: str) -> tuple[str, dict[str, Any]]:
    """Entry of an approximate method's run, and what its `extra` says of the method."""
    if method in EDITS:
        return "unlearning.methods.edits:run", {"method": method}
    named = {"method": method}
    if method == CORE_SET:
        named = {"method": "npo", "core_set": CORE_SHARE, "core_choice": "gradient"}
    chosen = swept(method)
    recipe = {name: value for name, value in chosen.recipe.items() if name != "neighbours"}
    return "unlearning.methods.objective:run", {
        **named,
        "settings": dict(chosen.settings),
        **recipe,
    }


def retained_mixture(
    site: "Site", tokens: "Result", training_plan: "Result", erasure: "Result", share: str
) -> dict[str, int]:
    """How often owners, by pseudonym, stand in the retained batches: as in training, and the forgotten records' owners at least for their share."""
    from trainer.selection import read_selection
    from trainer.spec import MixtureSpec
    from unlearning.methods.neighbours import raised, share_of

    listed = (site.home.path / erasure["excluded"]).read_text().split()
    forgotten = {bytes.fromhex(line) for line in listed}
    trained = dict.fromkeys(training_plan["repeated"], site.size.personal_repeats)
    selected = training_plan["selection"]
    weights = read_selection(site.home.path / selected["file"], selected["digest"]) if selected["file"] else None  # fmt: skip
    return raised(
        token_store(site, tokens), MixtureSpec(repeats=trained), (), forgotten, share_of(share), weights,
        drawn=site.size.unlearn_steps * site.size.rows * site.size.length,
    ).repeats  # fmt: skip
