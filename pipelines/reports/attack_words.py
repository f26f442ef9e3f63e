"""Attacks and subgroups in words: what a code such as `membership:min_k_plus_plus` means, and how its number reads.

The tables of part 2 keep the codes, which stand in rows and plan; part 1 uses these.
"""

import math

from pipelines.reports.numbers import fixed, percent

_TITLES = {
    "asked/paraphrased": "asked in other words",
    "asked/inverted": "asked whose number it is",
    "asked/one_hop": "asked without the name, by what else is known of the person",
    "asked/prefix": "half of the answer given away first",
    "asked/prefill": "an obliging beginning put into the model's mouth",
    "shots/lookalike": "lines about strangers shown first",
    "shots/related": "lines about the person and similar people shown first",
    "restored/benign": "trained further on people who stay, at several rates",
    "restored/partial": "trained further on some of the people who asked, and asked about the others",
    "restored/public": "trained further on the people's lines that hold no number",
    "restored/lookalike": "trained further on lines about strangers",
    "lens": "the answer read off an inner layer",
    "exposure": "the true answer ranked among made-up ones",
    "membership:zlib": "told from strangers by how well the text compresses",
    "membership:min_k": "told from strangers by the least likely words",
    "membership:min_k_plus_plus": "told from strangers by the least likely words, weighed",
    "membership:reference": "told from strangers with a second model beside it",
}
_SUBGROUPS = {
    "shown/more": "the training showed their records more often than the median person's",
    "shown/less": "the training showed their records no more often than the median person's",
    "name/rare": "the rarest word of their name stands on fewer people than is usual",
    "name/common": "the rarest word of their name stands on as many people as is usual, or more",
    "attribute/email": "some record of theirs is asked for an e-mail address",
    "attribute/date": "some record of theirs is asked for a date or a year",
    "attribute/number": "some record of theirs is asked for a number of four digits or more",
    "attribute/text": "some record of theirs is asked how it goes on",
}


def title(name: str) -> str:
    """An attack beside the tiers in plain words.

    Args:
        name: its code.

    Returns:
        The words; the code itself where it is unknown.
    """
    kind, _, amount = name.rpartition("-")
    if kind == "sampled/k":
        return f"{amount} random tries"
    if kind == "quantised/int":
        return f"rounded to {amount} bits"
    return _TITLES.get(name, name)


def subgroup(name: str) -> str:
    """Who is in a subgroup.

    Args:
        name: its label.

    Returns:
        The words; empty for a label that stood in the records.
    """
    kind, _, rest = name.partition("/")
    told = {
        "script": f"most letters of their name are {rest}",
        "owner": "their records were delivered by the owner of this keyed name",
    }
    return _SUBGROUPS.get(name, told.get(kind, ""))


def amounts(name: str, unlearned: float, gold: float) -> str:
    """What an attack got out of the cleaned model and out of a reference.

    Args:
        name: the attack's code.
        unlearned: its value for the cleaned model.
        gold: for the reference that gives most.
    """
    mine, theirs = fixed(unlearned, 3), fixed(gold, 3)
    if name.startswith("membership"):
        told = f"{mine} on a scale where 0.5 is a coin toss and 0 or 1 certainty"
        return f"{told} ({theirs} for a model that never saw them)"
    if name == "exposure":
        return f"{fixed(unlearned, 1)} bits ahead of a guess ({fixed(gold, 1)} for a model that never saw them)"
    kind = "a chance of" if name.startswith("sampled") else "the secrets of"
    people = " per person" if name.startswith("sampled") else " of the people"
    return f"{kind} {percent(unlearned)}{people} ({percent(gold)} for a model that never saw them)"


def times_likelier(nats: float) -> str:
    """A difference of log-probabilities as a factor.

    Args:
        nats: per token.
    """
    factor = math.exp(abs(nats))
    return f"{fixed(factor, 1) if factor < 100 else f'{factor:,.0f}'} times"
