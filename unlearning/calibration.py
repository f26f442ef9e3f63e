"""Which demonstrations make the original talk: found on people who stay, before the plan is fixed.

A tier in which the original itself gives hardly anybody away proves nothing (`endpoints`). How many lines before a question help, and what must
stand between them, depends on how the model was trained: one that never saw two texts together is rather confused by three lines than
led by them. So the original alone is asked about people *who stay*, in each way of `CANDIDATES`, and the way under which it tells most
of them stands in the plan::

    people who stay ──▶ half of them, at most `MAX_PEOPLE`, are asked about; lines of the others stand before the questions
    chosen = the way with most people given away; of equals the first, which is the plan's default

A number of lines that is fixed by hand is tried beside the others and chosen only where it brings out more: it can make the attack stronger on
people who stay, never weaker. Nothing is chosen on people who are to be forgotten, and no other model is opened: whatever the tier says of them
afterwards was not fitted to them. The choice is the best of eight noisy counts of the original: an unlearned model that talks only after another way
is not asked so. Where no way makes the original talk the default stays, and the tier is without power, as before.

Cost: one forward pass per way and question of at most 64 people. What was tried is kept in `calibration.json` (counts only), so that a killed audit doesn't
ask again; an HMAC under the request's key covers what was asked with and the counts, and whatever doesn't match is made anew.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from provenance.canonical import jcs, write_atomic
from unlearning.attacks.in_context import demonstrated
from unlearning.people import by_subject
from unlearning.plan import BETWEEN
from unlearning.probes import trained_probes
from unlearning.scoring import score_probes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from trainer.model import Transformer
    from unlearning.people import Record
    from unlearning.plan import AttackPlan
    from unlearning.probes import Tokenizer

FILE = "calibration.json"
FORMAT = 2
"""2: the tag covers everything that was asked with, and the counts."""
MAX_PEOPLE = 64
CANDIDATES = tuple((number, between) for between in BETWEEN for number in (3, 1, 2, 8))
_STREAM = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One way to demonstrate and what the original gave away."""

    demonstrations: int
    between: str
    given_away: int
    """People who stay whose answer came out."""
    people: int
    """People who stay who were asked about."""


def ways(limits: AttackPlan) -> tuple[tuple[int, str], ...]:
    """What is tried: `CANDIDATES`, and the plan's own number of lines where it is another.

    Args:
        limits: the adversary's limits.

    Returns:
        (lines, what stands between them), the plan's default first.
    """
    own = tuple((limits.demonstrations, between) for between in BETWEEN)
    return (*CANDIDATES, *(way for way in own if way not in CANDIDATES))


def calibrated(
    load: Callable[[], Transformer],
    retained: Sequence[Record],
    tokenizer: Tokenizer,
    limits: AttackPlan,
    seed: int,
) -> list[Tried]:
    """Ask the original about people who stay in every way.

    Args:
        load: gives the original, in evaluation mode; not called where fewer than two people stay.
        retained: records of people who stay.
        tokenizer: the run's tokenizer.
        limits: the adversary's limits.
        seed: seed of every draw.

    Returns:
        One entry per way, in the order of `ways`; none with fewer than two people.
    """
    from unlearning.material import Material

    people = by_subject(list(retained))
    drawn = np.random.default_rng([seed, _STREAM]).permutation(sorted(people)).tolist()
    asked = set(drawn[: min(MAX_PEOPLE, len(drawn) // 2)])
    if not asked:
        return []
    probes = trained_probes(retained, tokenizer, limits.max_probe_tokens)
    trained = tuple(probe for probe in probes if probe.subject_id in asked)
    shown = tuple(probe for probe in probes if probe.subject_id not in asked)
    model = load()
    found = []
    for number, between in ways(limits):
        material = Material(
            trained=trained, unseen=(), demonstrations=shown, forgotten=(), retained=(), lookalikes=(), newline=(),
            between=tuple(tokenizer.encode(BETWEEN[between])[0]), limits=limits.demonstrating(number, between), seed=seed,
        )  # fmt: skip
        exact_N = score_probes(model, demonstrated(material)).exact_N
        told = {p.subject_id for p, exact in zip(trained, exact_N, strict=True) if exact}
        found.append(Tried(demonstrations=number, between=between, given_away=len(told), people=len({p.subject_id for p in trained})))  # fmt: skip
    return found


def best(tried: Sequence[Tried]) -> Tried | None:
    """The way under which the original tells most; of equals the first.

    Args:
        tried: from `calibrated`.

    Returns:
        None where nothing was tried.
    """
    return max(tried, key=lambda one: one.given_away, default=None)


def kept(directory: Path, key: bytes, of: Sequence[Any], make: Callable[[], list[Tried]]) -> list[Tried]:  # fmt: skip
    """What was tried, from the run's folder or made now and kept there.

    Args:
        directory: the run's folder.
        key: the request's key.
        of: what it depends on beside this module's constants, as JSON values.
        make: makes it.

    Returns:
        The entries.
    """
    path = directory / FILE

    def written(tried: list[Tried]) -> bytes:
        counts = [asdict(one) for one in tried]
        over = jcs([FORMAT, CANDIDATES, BETWEEN, MAX_PEOPLE, list(of), counts])
        tag = hmac.new(key, b"dataworth/calibration/" + over, hashlib.sha256).hexdigest()
        return jcs({"format": FORMAT, "tag": tag, "tried": counts})

    if path.exists():
        data = path.read_bytes()
        try:
            found = [Tried(**one) for one in json.loads(data)["tried"]]
            if hmac.compare_digest(data, written(found)):
                return found
        except (ValueError, TypeError, LookupError):
            pass  # cut short, or no file of ours: made anew like one that doesn't match
    tried = make()
    write_atomic(path, written(tried))
    return tried
