"""Sizes of the study: a dial for time, never for what is asserted.

========  =================  =====================  =================================  ================================
profile   people (r/f/h)     model                  models                             asserts
========  =================  =====================  =================================  ================================
smoke     64 / 16 / 16       2 layers, width 48     original, 3 gold                   A1 to A6
pilot     256 / 64 / 64      4 layers, width 64     original, 3 gold, 8 methods        A1 to A16
report    300 / 300 / 300    4 layers, width 64     original, 3 gold, 8 methods        A1 to A16
========  =================  =====================  =================================  ================================

`report` is for bounds: none of 300 people means a true rate below 1.0 % (of 64: 4.6 %), and its margin is 2 points, not 5. It has as many
retained people as forgotten ones, where the pilot has four times as many: 900 more would cost three times the training and move no bound. Its
models are trained by Muon: AdamW had memorised nobody in more CPU time (README, "Report").

`smoke-bpe` and `pilot-bpe` are the same people in tokens of the platform: byte-level BPE that has never seen them, two to three times as many
tokens per line. `pilot-bpe` has the four methods that an assertion names.

The smoke profile's tier 2 shows one line (`SMOKE_SHOTS`), not three: asked after one, two, three lines its original gives 12, 3, 1 of 16
people away. That was looked up on the original alone, as the rate of tier 3 is; after three lines the tier would have no power, and no model could PASS.

Rows are short (64 tokens) and batches small: small batches memorise in far fewer tokens (README, "Measured").
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.spec import ModelSpec

LENGTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgetting:
    """One method and the numbers it runs with here; chosen once, not tuned per method."""

    lr: str
    """Learning rate, constant, decimal string."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Changes of the method's published settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Every number of a study."""

    name: str
    counts: dict[str, int]
    """Population → people."""
    pages: int
    """Documents of several retained people's lines."""
    layers: int
    dim: int
    steps: int
    """Steps of original and gold."""
    rows: int
    """Rows of `LENGTH` tokens per step."""
    lr: float
    golds: int
    """Gold models; their seeds are 0, 1, …"""
    method_steps: int = 200
    """Steps that a method has before it is taken as it is."""
    method_stride: int = 5
    """Steps between two looks at whether it has done what it can see."""
    forget_records: int = 32
    """Forgotten records per step of a method."""
    optimizer: str = "adamw"
    """Of original and gold; methods run with adamw."""
    methods: dict[str, Forgetting] = field(default_factory=dict)
    seed: int = 11
    """Seed of the people."""
    own_tokenizer: bool = True
    """Whether words are tokens; else the study is given a tokenizer file."""

    def model(self, vocab_size: int) -> ModelSpec:
        """Shape of every model of the study."""
        from trainer.spec import ModelSpec

        return ModelSpec(
            vocab_size=vocab_size, num_layers=self.layers, dim=self.dim, num_heads=4, num_kv_heads=4,
            ffn_dim=self.dim * 8 // 3 // 8 * 8,
        )  # fmt: skip


SMOKE = Profile(
    name="smoke", counts={"retained": 64, "forgotten": 16, "lookalike": 16}, pages=16, layers=2, dim=48, steps=750, rows=4, lr=0.006, golds=3
)  # fmt: skip

SMOKE_SHOTS = 1

# Rates of the notes' section 5.1. As there, a method stops when it has done what it can see: the forgotten numbers are no likelier than
# under gold and no more than one of 64 comes out; else after the last step (`models.Study.unlearned`). The rule looks at gold, which a
# method in earnest cannot; the study asks what attacks find behind numbers that look right.
PILOT = Profile(
    name="pilot", counts={"retained": 256, "forgotten": 64, "lookalike": 64}, pages=128, layers=4, dim=64, steps=1600, rows=16, lr=0.003, golds=3,
    methods={
        "ascent": Forgetting(lr="0.0001"),
        "graddiff": Forgetting(lr="0.0002"),
        "kl": Forgetting(lr="0.0002"),
        "npo": Forgetting(lr="0.0002"),
        "simnpo": Forgetting(lr="0.0002"),
        "rmu": Forgetting(lr="0.0005", settings={"layers": [1]}),
        "finetune": Forgetting(lr="0.0005"),
        "rau": Forgetting(lr="0.0005"),
    },
)  # fmt: skip

REPORT = dataclasses.replace(
    PILOT, name="report", counts={"retained": 300, "forgotten": 300, "lookalike": 300}, pages=100, steps=1400, optimizer="muon", lr=0.01,
    method_steps=200, method_stride=10, forget_records=64,
)  # fmt: skip

# Two shards of half the steps each; what the released mean of both holds is erased by training one of them again (`sharded`).
SHARDED = dataclasses.replace(PILOT, name="sharded", methods={})
# As many people as the first one's membership asked for (159 would decide); as many steps more as people.
SHARDED_160 = dataclasses.replace(
    SHARDED, name="sharded-160", counts={"retained": 256, "forgotten": 160, "lookalike": 160}, steps=2000
)  # fmt: skip

# Canaries in or out by coins, half of them in: as many people in a training as in the smoke profile (`shadows`).
SHADOWS = dataclasses.replace(
    SMOKE, name="shadows", counts={"retained": 64, "forgotten": 32, "lookalike": 16}, methods={"npo": PILOT.methods["npo"]},
)  # fmt: skip

SMOKE_BPE = dataclasses.replace(SMOKE, name="smoke-bpe", steps=1700, own_tokenizer=False)
PILOT_BPE = dataclasses.replace(
    PILOT, name="pilot-bpe", own_tokenizer=False, steps=1600, dim=96,
    methods={name: PILOT.methods[name] for name in ("ascent", "kl", "npo", "finetune")},
)  # fmt: skip

PROFILES = {profile.name: profile for profile in (SMOKE, SMOKE_BPE, PILOT, PILOT_BPE, REPORT)}
