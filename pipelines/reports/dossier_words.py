"""Part 1 of an audit report in words: for a reader who must answer for an erasure and knows no statistics.

Every sentence is made from the facts of the dossier alone, so that the first page can't say more than the tables behind it. A verdict
is explained by what it means for the person who asked, not by its formula.
"""

from dataclasses import dataclass

from pipelines.reports import attack_words
from pipelines.reports.audit import (
    MIN_GOLD_SEEDS,
    Membership,
    Rate,
    TierRow,
    Utility,
    VerdictName,
    ZeroBound,
)
from pipelines.reports.dossier import Dossier
from pipelines.reports.headline import three
from pipelines.reports.numbers import fixed, integer, percent, signed
from pipelines.reports.parts import NotAvailable

MODELS = ("Before the erasure", "cleaned", "never saw them")
_MEANING = {
    "PASS": "The people count as forgotten by this model: under every attack that was tried, the cleaned model gave no more away than "
    "a model that never saw the records, within a margin that was fixed before anybody looked.",
    "FAIL": "The people are not forgotten by this model: at least one attack got more out of the cleaned model than out of a model that never "
    "saw the records, by more than the margin that was fixed before anybody looked.",
    "INCONCLUSIVE": "The evidence doesn't decide. Treat the people as still in the model until a larger audit decides.",
    "INVALID": "The audit can't be relied on, because something that must hold for any audit did not hold here. It says nothing about forgetting "
    "in either direction. Treat the people as still in the model.",
}
_TIERS = {
    "1": ("Asked directly", "anybody who may ask the model questions"),
    "2": (
        "Asked after examples",
        "anybody who may ask the model questions and knows a few lines of the same kind",
    ),
    "3": (
        "Asked after further training",
        "somebody who has the model's files and trains it a little on other records",
    ),
}
_METHODS = {
    "exact retrain": "A new model was trained from scratch without the records (exact).",
    "shard retrain": "Only the part of the model that had seen the records was trained anew without them (exact by construction).",
    "approximate": "The records were pushed out of the trained model afterwards (approximate): whether that worked is what this audit asks.",
}
_ACCESS = (
    ("asked/", "queries only"),
    ("shots/", "queries only, and lines to show before the question"),
    ("sampled", "queries only, many tries"),
    ("lens", "the model's files, and some programming"),
    ("quantised/", "the model's files, rounded to fewer bits"),
    ("restored/", "the model's files, and some further training"),
    ("exposure", "the model's probabilities, and a list of candidates"),
    ("membership", "the model's probabilities"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One finding in plain words."""

    verdict: VerdictName
    title: str
    text: str


def meaning(dossier: Dossier) -> str:
    """What the overall verdict means."""
    return _MEANING[dossier.audit.verdict]


_CONTROLS = (
    (
        "gold exists",
        "there is no reference model that never saw the records, so that there is nothing to compare with",
    ),
    (
        "original leaks",
        "the model before the erasure does not give the secrets away when asked, so that no attack could show whether they are gone",
    ),
    (
        "original would fail",
        "the model before the erasure and the reference can't be told apart, so that a cleaned model can't be either",
    ),
    (
        "gold against",
        "two references that never saw the records differ by more than what is allowed of a cleaned model",
    ),
    (
        "gold",
        "the reference gives secrets away that it never saw: the questions leak, not the model",
    ),
    (
        "fine-tuning attack",
        "further training wiped the original's own memory, so that it would clear any model (or it was too short to tell)",
    ),
    ("random weights", "a model that knows nothing was not found to be useless"),
    ("membership", "the test for presence can't tell the original from the reference"),
    ("look-alikes", "the people used for comparison differ from those who asked"),
)


def why(dossier: Dossier) -> str:
    """The reason of the verdict without a formula.

    Args:
        dossier: the dossier.

    Returns:
        One or more sentences; the exact ones stand in part 2.
    """
    audit = dossier.audit
    if audit.verdict == "INVALID":
        broken = [one.name for one in audit.controls if not one.holds]
        told = dict.fromkeys(
            next((text for name, text in _CONTROLS if _kind(one).startswith(name)), one)
            for one in broken
        )
        listed = "; ".join(told)
        return f"{listed[:1].upper()}{listed[1:]}."
    named = [line.title for line in lines(dossier) if line.verdict == audit.verdict]
    named += [attack_words.title(one.name) for one in audit.side if one.leaks]
    if audit.verdict == "PASS":
        return "Every attack stayed within its margin, and every control held."
    if audit.verdict == "FAIL":
        return f"Beyond what was allowed: {', '.join(named)}."
    missing = [f"undecided: {', '.join(named)}"] if named else []
    if isinstance(audit.membership, NotAvailable):
        missing.append("presence was not tested")
    if audit.num_gold_seeds < MIN_GOLD_SEEDS:
        seen = f"{audit.num_gold_seeds} reference model{'s' * (audit.num_gold_seeds != 1)}"
        missing.append(f"{seen}, and fewer than three do not show how much they differ")
    if dossier.evidence.unchecked:
        missing.append("where the models come from could not be checked in full")
    listed = "; ".join(missing) or audit.reason.rstrip(".")
    return f"{listed[:1].upper()}{listed[1:]}."


def _kind(control: str) -> str:
    """A control's name without which gold model it is about."""
    return "gold against" if control.endswith("against the others") else control


def not_tested(dossier: Dossier) -> str:
    """What was not tried, in one phrase."""
    return "; ".join(dossier.audit.not_tested)


def grouped(dossier: Dossier) -> tuple[tuple[str, str], ...]:
    """Copies of equal state in one row: (what, state), in the order of the dossier."""
    found: dict[str, list[str]] = {}
    for one in dossier.copies:
        found.setdefault(one.state, []).append(one.what)
    return tuple((", ".join(names), state) for state, names in found.items())


def removal(dossier: Dossier) -> str:
    """The method in one sentence."""
    return _METHODS[dossier.kind]


def lines(dossier: Dossier) -> tuple[Line, ...]:
    """One finding per tier, then membership and cost.

    Args:
        dossier: the dossier.

    Returns:
        Findings in the order of the audit.
    """
    found = [_tier(row, dossier) for row in dossier.audit.tiers]
    if isinstance(dossier.audit.membership, Membership):
        found.append(_membership(dossier.audit.membership))
    if isinstance(dossier.audit.utility, Utility):
        found.append(_utility(dossier.audit.utility))
    return tuple(found)


def _tier(row: TierRow, dossier: Dossier) -> Line:
    title, _ = _TIERS.get(row.tier, (row.name, ""))
    if not isinstance(row.unlearned, Rate):
        return Line(
            verdict=row.verdict, title=title, text=f"Not available: {row.unlearned.reason}."
        )
    told = f"Of {integer(row.unlearned.n)} people, {integer(row.unlearned.hits)} could be read out of the cleaned model"
    told += f" (before the erasure: {_hits(row.original)}; a model that never saw them: {_hits(row.gold)})."
    zero = _zero(row, dossier)
    if zero is not None:
        told += f" With {percent(zero.level, 0)} confidence the true share is below {percent(zero.bound)}."
    return Line(verdict=row.verdict, title=title, text=f"{told} {_compared(row)}")


def _hits(rate: Rate | NotAvailable) -> str:
    return f"{integer(rate.hits)}" if isinstance(rate, Rate) else "not available"


def _zero(row: TierRow, dossier: Dossier) -> ZeroBound | None:
    return next((one for one in dossier.audit.zero_bounds if one.what.startswith(row.name)), None)


def _compared(row: TierRow) -> str:
    """The bound against the margin, in words."""
    points = f"{fixed(100 * row.margin, 1)} percentage points"
    if row.verdict == "INVALID":
        return "A control failed: this number says nothing."
    if row.bound is None:
        return "There is no reference model to compare it with."
    if row.has_power is False and row.verdict == "INCONCLUSIVE":
        return f"{row.reason[:1].upper()}{row.reason[1:]}. What came out here decides nothing."
    bound = f"{signed(100 * row.bound, 1)} points"
    if row.verdict == "PASS":
        return f"At most {bound} above the reference, with 95 % confidence; up to {points} were allowed."
    if row.verdict == "FAIL":
        least = (
            f"at least {signed(100 * row.low, 1)} points"
            if row.low is not None
            else "by more than the margin"
        )
        return f"Above the reference {least}, with 95 % confidence; up to {points} were allowed."
    more = f" {row.reason[:1].upper()}{row.reason[1:]}." if row.reason else ""
    return f"Perhaps up to {bound} above the reference, and {points} were allowed: too few people to decide.{more}"


def _membership(part: Membership) -> Line:
    values = three(part, 2, MODELS)
    text = (
        "Can one tell that a person was in the training data at all? 0.50 is a coin toss, 1.00 certainty; far below 0.50 gives it "
        f"away too. {values}; {fixed(part.margin, 2)} from the last was allowed."
    )
    text += f" {_capital(part.reason)}." if part.reason and part.verdict == "INCONCLUSIVE" else ""
    return Line(verdict=part.verdict, title="Was a person in it?", text=text)


def _utility(part: Utility) -> Line:
    values = three(part, 3, MODELS)
    text = (
        f"How badly the texts of people who stay are foreseen (loss, nats per token; 0 is word for word). {values}; "
        f"{fixed(part.margin, 2)} above the last was allowed. A ruined model forgets everybody, which is no success."
    )
    text += f" {_capital(part.reason)}." if part.reason and part.verdict == "INCONCLUSIVE" else ""
    return Line(verdict=part.verdict, title="What it cost", text=text)


def side_lines(dossier: Dossier) -> tuple[str, ...]:
    """What the attacks beside the tiers found, in words: the leaks first, then a sentence about the others."""
    side = dossier.audit.side
    if not side:
        return (
            "No attack beside the three was tried in this audit; what was not tried is listed below.",
        )
    leaks = [one for one in side if one.leaks]
    told = [f"{_capital(attack_words.title(one.name))}: {attack_words.amounts(one.name, one.unlearned, one.gold)}, more than was allowed." for one in leaks]  # fmt: skip
    quiet = len(side) - len(leaks)
    told.append(
        f"{integer(quiet)} further attack{'s' * (quiet != 1)} beside the three found nothing beyond the margin that chance does not explain."
    )
    return tuple(told)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def attackers(dossier: Dossier) -> tuple[str, ...]:
    """Who can still get something out, and at what cost, least effort first.

    Args:
        dossier: the dossier.

    Returns:
        One sentence per open way; one that says so if none is known.
    """
    audit = dossier.audit
    if audit.verdict == "INVALID":
        return (
            "Not known: the audit is invalid. Assume that anybody who may ask the model can get the numbers out.",
        )
    found = []
    for row in audit.tiers:
        if row.verdict == "FAIL" and isinstance(row.unlearned, Rate):
            who = _TIERS.get(row.tier, ("", "somebody"))[1]
            found.append(f"{who[:1].upper()}{who[1:]}: {integer(row.unlearned.hits)} of {integer(row.unlearned.n)} people ({row.budget}).")  # fmt: skip
    for one in audit.side:
        if one.leaks:
            need = next(
                (words for prefix, words in _ACCESS if one.name.startswith(prefix)),
                "the model's files",
            )
            found.append(f"{_capital(attack_words.title(one.name))}, needs {need}: {attack_words.amounts(one.name, one.unlearned, one.gold)}.")  # fmt: skip
    if isinstance(audit.membership, Membership) and audit.membership.verdict == "FAIL":
        found.append("Whoever can read the model's probabilities can tell that the people were in its training data.")  # fmt: skip
    if found:
        return tuple(found)
    if audit.verdict == "PASS":
        return ("Nobody that was simulated here. Attacks that were not tried are listed below.",)
    return (
        "Nobody for certain, and nobody ruled out: the bounds are wider than what was allowed.",
    )


def residual(dossier: Dossier) -> str:
    """The risk that stays, in one paragraph."""
    audit = dossier.audit
    worst = max((row.excess_worst for row in dossier.evidence.leakage if not row.subgroup), default=None)  # fmt: skip
    told = {
        "PASS": "Small under the attacks of this audit; not zero.",
        "FAIL": "Open to whoever makes the effort named above. The cleaned model must not be released or kept in use as if the people were gone.",
        "INCONCLUSIVE": "Unknown within the bounds above. Until they are narrowed, it has to be taken as present.",
        "INVALID": "Unknown. It has to be taken as present.",
    }[audit.verdict]
    if worst is not None and audit.verdict != "INVALID":
        than = "likelier" if worst > 0 else "less likely"
        told += f" Averages hide single people: for the person who is told most, each piece of the secret is {attack_words.times_likelier(worst)} {than} than under every reference model ({signed(worst, 2)} nats per token; zero or less is as it should be)."
    return f"{told} {dossier.release[:1].upper()}{dossier.release[1:]}."


def basis(dossier: Dossier) -> str:
    """On what legal basis the erasure was asked for, as stated with each request."""
    stated: dict[str, list[str]] = {}
    for one in dossier.requests:
        stated.setdefault(one.basis, []).append(one.reference)
    missing = stated.pop("", [])
    told = [f"{words} ({', '.join(names)})" for words, names in stated.items()]
    open_ = (
        f"not stated for {', '.join(missing)} (dataworth erase --basis): Art. 17 GDPR (right to erasure) and Art. 5(2) (accountability) "
        "where they apply; the controller states it here"
    )
    return "Legal basis: " + "; ".join(told + [open_] * bool(missing)) + "."


def reviews(dossier: Dossier) -> tuple[str, ...]:
    """Who has read which state of the report, the last two."""
    now = dossier.reviewable
    told = [
        f"Reviewed by {one.by} at {one.at}: {'this report' if one.report == now else 'an earlier state of this report'}, "
        f"digest {one.report[:16]}, committed to in ledger entry {one.entry}."
        for one in dossier.reviews[-2:]
    ]
    hand = "The program enters the name it was given; it doesn't check whose hand gave it."
    return (*told, hand) if told else ()


def next_steps(dossier: Dossier) -> tuple[str, ...]:
    """What to do now."""
    audit = dossier.audit
    is_open = any(one.state not in ("shredded", "refused") for one in dossier.requests)
    steps = list(
        {
            "PASS": ("Release the cleaned model; keep this report with it.",),
            "FAIL": (
                "Don't release the cleaned model. Use the model that was retrained without the records, which needs no proof of forgetting.",
                "Or ask for another method (dataworth erase --method) and audit again.",
            ),
            "INCONCLUSIVE": tuple(_would_decide(dossier)),
            "INVALID": (
                "Repair what the failed controls name (part 2, Controls) and audit again: "
                + "; ".join(control.name for control in audit.controls if not control.holds)
                + ".",
                "Until then use the model that was retrained without the records.",
            ),
        }[audit.verdict]
    )
    if is_open:
        steps.append("Finish the requests (dataworth erase --finish; by itself after the deadline): text, key and old model are destroyed, and searched for.")  # fmt: skip
    steps += [
        "Tell the people who asked what was done, and that it is told again when the model changes.",
        "Audit again whenever the model is trained further, fine-tuned or rounded to fewer bits.",
    ]
    return tuple(steps)


def _would_decide(dossier: Dossier) -> list[str]:
    audit = dossier.audit
    steps = [
        f"{row.name[:1].upper()}{row.name[1:]}: {row.reason}."
        for row in audit.tiers
        if row.verdict == "INCONCLUSIVE" and row.reason
    ]
    if audit.num_gold_seeds < MIN_GOLD_SEEDS:
        steps.append(
            f"Audit with three reference models instead of {audit.num_gold_seeds} ([audit] gold_models = 3 in dataworth.toml): fewer do not show how much they differ."
        )
    if isinstance(audit.membership, NotAvailable):
        steps.append(f"Membership was not tested: {audit.membership.reason}.")
    else:
        steps += [f"{name}: {part.reason}." for name, part in (("Was a person in it?", audit.membership), ("What it cost", audit.utility)) if not isinstance(part, NotAvailable) and part.verdict == "INCONCLUSIVE" and part.reason]  # fmt: skip
    if dossier.evidence.unchecked:
        steps.append("Audit models whose run files and data are there and whose digests the ledger knows (part 2 lists what was missing).")  # fmt: skip
    return [*steps, "Until then use the model that was retrained without the records."]
