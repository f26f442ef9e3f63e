"""The one file a user edits: ``dataworth.toml``, as frozen dataclasses.

Each field carries its explanation, and :func:`render` writes these explanations as comments, so
that the file a user opens and the code that reads it cannot drift apart. Reading is strict: an
unknown key is an error that names the nearest known one, because a misspelt ``reserve_microunits``
that is silently ignored would pay out the wrong money.

What is *not* here: anything from the environment (``pipelines.settings`` reads that), keys and
secrets (:mod:`pipelines.storage.keys`), and the recipe of a training.
"""

import dataclasses
import datetime as dt
import difflib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from pipelines.storage.errors import ConfigError
from pipelines.storage.terms import (
    AuditConfig,
    BuyerConfig,
    InformationConfig,
    OwnerConfig,
    PricingConfig,
    ValuesConfig,
    option,
)
from provenance.canonical import MAX_INTEGER

FORMAT: Final = 1
SIZES: Final = ("tiny", "small", "default", "pilot", "report")
OWNER_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""An owner id is a folder name and stands in file names: no spaces, no path separators."""

DELIVERY_LICENCE: Final = "LicenseRef-delivery"
"""What is recorded for a record that states no licence: the terms agreed with its owner."""

_NO_TARGET = """no target: values are measured on held-out records, so dataworth.toml must say which. Add two lines:
[target]
since = "2024-01-01"   # records from this day on are held out; or: path = "target.jsonl\""""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetConfig:
    """Which records are held out to measure value on."""

    since: str | None = option(
        "records dated on or after this day are held out", None, '"2024-01-01"'
    )
    path: str | None = option(
        "or: a file of held-out records (.jsonl, .parquet, .csv)", None, '"target.jsonl"'
    )

    def __post_init__(self) -> None:
        """One of the two, and a real day."""
        if self.since is not None and self.path is not None:
            raise ConfigError("[target] has both since and path: keep one of them")
        if self.since is not None and not is_day(self.since):
            raise ConfigError('[target] since is a day written "YYYY-MM-DD"')


@dataclass(frozen=True, kw_only=True, slots=True)
class IntakeConfig:
    """What is accepted from the inbox."""

    licences: tuple[str, ...] = option(
        "licences (SPDX) that a record may state; others go to quarantine",
        (
            "public-domain",
            "LicenseRef-public-domain",
            "CC-PDDC",
            "PDDL-1.0",
            "CC0-1.0",
            "CC-BY-3.0",
            "CC-BY-4.0",
        ),
    )
    text_licence: str = option(
        'licence of records that state none, like all .txt and .md; "" sends them to quarantine',
        DELIVERY_LICENCE,
    )
    personal_owners: tuple[str, ...] = option("owners whose every record is personal data", ())
    max_record_chars: int = option("longest record in characters", 100_000)
    max_file_bytes: int = option("largest delivery file in bytes, after decompression", 1 << 30)
    max_file_rows: int = option("most rows of one delivery file", 5_000_000)
    max_expansion: int = option(
        "most bytes that one compressed byte may become (against zip bombs)", 200
    )

    def __post_init__(self) -> None:
        """Positive limits and licences that fit into a leaf."""
        for name in ("max_record_chars", "max_file_bytes", "max_file_rows", "max_expansion"):
            if not 1 <= getattr(self, name) <= MAX_INTEGER:
                raise ConfigError(f"[intake] {name} is at least 1 and at most 2^53 - 1")
        if self.max_record_chars > 10_000_000:
            raise ConfigError(
                "[intake] max_record_chars is at most 10_000_000: a record is held in memory"
            )
        for licence in (*self.licences, self.text_licence):
            if not licence.isascii() or len(licence) > 255:
                raise ConfigError("[intake] a licence has at most 255 ASCII characters")
        if "" in self.licences:
            raise ConfigError("[intake] licences holds an empty string")


FINISHES: Final = ("run", "asked")


@dataclass(frozen=True, kw_only=True, slots=True)
class ErasureConfig:
    """How a person is forgotten, and by when."""

    method: str = option(
        "how to forget: exact, or a name that `dataworth erase --plan` lists", "npo"
    )
    finish: str = option(
        "when an audited request's text, salts and old models are destroyed: run (at the end of the run that audited it) "
        "or asked (dataworth erase --finish); in any case once its deadline has passed",
        "run",
    )
    days: int = option("days from request to deadline; GDPR Art. 12(3) gives one month", 30)
    lora_rank: int = option(
        "rank of the low-rank adapters that a loss trains in place of all weights, on one process; 0: all weights. exact and "
        "sharded train from scratch and have none",
        0,
    )

    def __post_init__(self) -> None:
        """A moment that exists, and a rank that can be meant."""
        if not 0 <= self.lora_rank <= MAX_RANK:
            raise ConfigError(f"[erasure] lora_rank: expected 0..{MAX_RANK}, got {self.lora_rank}")
        if self.finish not in FINISHES:
            raise ConfigError(
                f"[erasure] finish: expected one of {', '.join(FINISHES)}, got {self.finish!r}"
            )
        if not 1 <= self.days <= 365:
            raise ConfigError(f"[erasure] days: expected 1..365, got {self.days}")


MAX_RANK: Final = 4096
OPTIMIZERS: Final = ("adamw", "muon")
SCHEDULES: Final = ("cosine", "wsd")
PRECISIONS: Final = ("float32", "bfloat16", "float64")
SELECTIONS: Final = ("all", "drop-negative", "by-value")
GUARDS: Final = ("off", "skip", "rollback")
MAX_PARTS: Final = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """How the released model and its gold models are trained."""

    layout: str = option(
        'processes: "2" (copies), "dp_shard=2 tp=2", "pp=2 microbatches=4"; "" leaves it to the size',
        "",
    )
    optimizer: str = option("adamw, or muon for the hidden matrices", "adamw")
    schedule: str = option(
        "learning rate after the warm-up: cosine, or wsd (flat, then a short decay)", "cosine"
    )
    precision: str = option(
        "float32, bfloat16 (products only; about twice as fast), or float64", "float32"
    )
    accumulation: int = option(
        "micro-batches of a step: more need less memory and change no result", 1
    )
    guard: str = option(
        "when the loss jumps: off, skip that update, or rollback to the newest checkpoint", "off"
    )
    selection: str = option(
        "records to train on: all alike, drop-negative (leave out what in-run credit finds harmful), "
        "or by-value (sample by that credit, at most four times as often)",
        "all",
    )

    shards: int = option(
        "models that the released one is the mean of, each trained on the people of one part: forgetting a person retrains one part only "
        '(then [erasure] method = "sharded"); 1 trains a single model',
        1,
    )
    slices: int = option("checkpoints of a part, to retrain from the last one before a person", 1)

    def __post_init__(self) -> None:
        """Choices that the trainer knows."""
        from trainer.errors import SpecError
        from trainer.layout import parse_layout

        for name, known in (
            ("optimizer", OPTIMIZERS),
            ("schedule", SCHEDULES),
            ("precision", PRECISIONS),
            ("guard", GUARDS),
            ("selection", SELECTIONS),
        ):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(
                    f"[training] {name} is one of {', '.join(known)}, got {value!r}{_near(value, known)}"
                )
        for name in ("shards", "slices"):
            if not 1 <= getattr(self, name) <= MAX_PARTS:
                raise ConfigError(
                    f"[training] {name}: expected 1..{MAX_PARTS}, got {getattr(self, name)}"
                )
        if self.slices > 1 and self.shards == 1:
            raise ConfigError("[training] slices divide a shard: expected shards of 2 or more")
        if self.shards > 1 and self.selection != "all":
            raise ConfigError(
                f"[training] selection {self.selection!r} weighs records of one model; with shards it is all"
            )
        if not 1 <= self.accumulation <= MAX_INTEGER:
            raise ConfigError(f"[training] accumulation is at least 1, got {self.accumulation}")
        try:
            parse_layout(self.layout)
        except (
            SpecError
        ) as error:  # whether the size can be divided so is seen when the size is known
            raise ConfigError(f"[training] {error}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The whole of ``dataworth.toml``."""

    format: int = option("format of this file", FORMAT)
    size: str = option(f"how much work a run may be: {', '.join(SIZES)}", "default")
    target: TargetConfig = field(default_factory=TargetConfig)
    pricing: PricingConfig = field(default_factory=PricingConfig)
    values: ValuesConfig = field(default_factory=ValuesConfig)
    information: InformationConfig = field(default_factory=InformationConfig)
    intake: IntakeConfig = field(default_factory=IntakeConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    erasure: ErasureConfig = field(default_factory=ErasureConfig)
    owners: Mapping[str, OwnerConfig] = field(default_factory=dict)
    buyers: Mapping[str, BuyerConfig] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """A format and a size that this program knows, and owners that can be folders."""
        if self.format != FORMAT:
            raise ConfigError(
                f"dataworth.toml has format {self.format}, this program knows {FORMAT}"
            )
        if self.size not in SIZES:
            raise ConfigError(
                f"size is one of {', '.join(SIZES)}, got {self.size!r}{_near(self.size, SIZES)}"
            )
        for owner in (*self.owners, *self.intake.personal_owners):
            if not OWNER_PATTERN.fullmatch(owner):
                raise ConfigError(f"owner {owner!r}: letters, digits, '.', '_' and '-', at most 64")
        for buyer in self.buyers:
            if not OWNER_PATTERN.fullmatch(buyer):
                raise ConfigError(f"buyer {buyer!r}: letters, digits, '.', '_' and '-', at most 64")

    def require_target(self) -> TargetConfig:
        """The target.

        Returns:
            A target with either ``since`` or ``path``.

        Raises:
            ConfigError: there is none; the message holds the two lines to add.
        """
        if self.target.since is None and self.target.path is None:
            raise ConfigError(_NO_TARGET)
        return self.target

    @property
    def entity_of(self) -> dict[str, str]:
        """Owner → legal entity, of the owners for whom one is declared."""
        return {owner: entry.entity for owner, entry in self.owners.items() if entry.entity}

    def document(self) -> dict[str, Any]:
        """The configuration as integers, strings, lists and objects, to be hashed or signed.

        Returns:
            An object for ``provenance.jcs``; what is not set is left out.
        """
        return _plain(dataclasses.asdict(self))


_PARTS: dict[str, type] = {
    "target": TargetConfig, "pricing": PricingConfig, "values": ValuesConfig, "information": InformationConfig, "intake": IntakeConfig,
    "training": TrainingConfig, "audit": AuditConfig, "erasure": ErasureConfig,
}  # fmt: skip
"""Sections, in the order in which they are written."""


def load(path: Path) -> Config:
    """Read ``dataworth.toml``.

    Args:
        path: the file.

    Returns:
        The checked configuration.

    Raises:
        ConfigError: missing, not TOML, an unknown key or a value of the wrong kind.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"no {path.name} in the home: run `dataworth init`") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name} cannot be read: {type(error).__name__}") from None
    return parse(text)


def parse(text: str) -> Config:
    """The configuration that a TOML text stands for.

    Args:
        text: the content of ``dataworth.toml``.

    Returns:
        The checked configuration.

    Raises:
        ConfigError: not TOML, an unknown key or a value of the wrong kind.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"dataworth.toml is not TOML: {error}") from None
    values: dict[str, Any] = {}
    for name, part in _PARTS.items():
        values[name] = _section(part, table.pop(name, {}), f"[{name}]")
    owners = table.pop("owners", {})
    if not isinstance(owners, dict):
        raise ConfigError("[owners] is a table: write [owners.NAME]")
    values["owners"] = {
        owner: _section(OwnerConfig, entry, f"[owners.{owner}]") for owner, entry in owners.items()
    }
    buyers = table.pop("buyers", {})
    if not isinstance(buyers, dict):
        raise ConfigError("[buyers] is a table: write [buyers.NAME]")
    values["buyers"] = {
        buyer: _section(BuyerConfig, entry, f"[buyers.{buyer}]") for buyer, entry in buyers.items()
    }
    scalars = {"format": int, "size": str}
    for key, value in table.items():
        if key not in scalars:
            known = (*scalars, *_PARTS, "owners", "buyers")
            raise ConfigError(f"unknown key {key!r} in dataworth.toml{_near(key, known)}")
        values[key] = _checked(value, scalars[key], key)
    return Config(**values)


def render(config: Config) -> str:
    """The TOML text of a configuration, every key explained.

    Args:
        config: any configuration.

    Returns:
        A text that :func:`parse` turns into the same configuration.
    """
    lines = ["# Dataworth: what is measured, what is paid, what is accepted.", ""]
    lines += _lines(config)
    for name in _PARTS:
        lines += ["", f"[{name}]", *_lines(getattr(config, name))]
    for owner, entry in config.owners.items():
        lines += ["", f"[owners.{json.dumps(owner)}]", *_lines(entry)]
    if not config.owners:
        shown = ["[owners.NAME]", *_lines(OwnerConfig(name="Jane Doe", licence="CC-BY-4.0"))]
        lines += ["", *(f"# {line.removeprefix('# ')}" for line in shown)]
    for buyer, terms in config.buyers.items():
        lines += ["", f"[buyers.{json.dumps(buyer)}]", *_lines(terms)]
    if not config.buyers:
        lines += ["", "# [buyers.NAME] adds a buyer: a file as target, a pool and the other keys of [pricing] on money"]  # fmt: skip
    return "\n".join(lines) + "\n"


def default_text() -> str:
    """What ``dataworth init`` writes.

    Returns:
        The default configuration with all its comments.
    """
    return render(Config())


def is_day(text: str) -> bool:
    """Whether a text is a calendar day written YYYY-MM-DD.

    Args:
        text: any text.

    Returns:
        True for a day that exists.
    """
    if not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
        return False
    try:
        dt.date.fromisoformat(text)
    except ValueError:
        return False
    return True


def _section(kind: type[T], table: Any, where: str) -> T:
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is a table")
    known = {part.name: part.type for part in dataclasses.fields(kind)}  # type: ignore[arg-type]  # always a dataclass
    for key in table:
        if key not in known:
            raise ConfigError(
                f"unknown key {key!r} in {where} of dataworth.toml{_near(key, tuple(known))}"
            )
    return kind(
        **{key: _checked(value, known[key], f"{key} in {where}") for key, value in table.items()}
    )


def _checked(value: Any, kind: Any, where: str) -> Any:
    """The value, if TOML gave the kind that the field wants; a TOML day is as good as its text."""
    if isinstance(value, dt.date) and not isinstance(value, dt.datetime):
        value = value.isoformat()
    if kind == tuple[str, ...]:
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise ConfigError(f"{where}: expected a list of strings")
    wanted = int if kind in (int, int | None) else str
    if type(value) is not wanted:
        raise ConfigError(
            f"{where}: expected {'an integer' if wanted is int else 'a string'}, got {value!r}"
        )
    return value


def _near(key: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f": did you mean {close[0]!r}?" if close else f": known are {', '.join(known)}"


def _lines(part: Any) -> list[str]:
    lines = []
    for item in dataclasses.fields(part):
        if "doc" not in item.metadata:
            continue
        value = getattr(part, item.name)
        shown = (
            f"# {item.name} = {item.metadata['example']}"
            if value is None
            else f"{item.name} = {_toml(value)}"
        )
        lines += [f"# {item.metadata['doc']}", shown]
    return lines


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    # A TOML basic string is a JSON string, except that TOML escapes DEL too.
    return (
        str(value)
        if isinstance(value, int)
        else json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return list(value) if isinstance(value, tuple) else value
