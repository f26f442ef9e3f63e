"""Where the corpus lives: deliveries in, versions with roots, tokens and targets out.

The flow, one noun per module::

    config, home, keys ─▶ deliveries ─▶ rows ─▶ checks ─▶ intake ─▶ versions ─▶ tokens, target, query
                          (the inbox)  (+ parquet_pages)     │      archive, blocks, manifest,
                          demo                           suppression  salts, verification

Names load on first use: ``import pipelines.storage`` loads neither polars nor DuckDB nor a tokenizer.
See README.md in this folder.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.storage.archive import Archive, Diff
    from pipelines.storage.config import Config, default_text
    from pipelines.storage.demo import demo_config, seed_demo
    from pipelines.storage.errors import (
        ConfigError,
        CorruptionError,
        DemoError,
        DiskFullError,
        HomeError,
        IntakeError,
        KeysError,
        QueryError,
        SaltError,
        StaleParentError,
        StorageError,
        TargetError,
        TokenizerError,
        UnknownVersionError,
        VersionError,
    )
    from pipelines.storage.home import Home
    from pipelines.storage.intake import Intake, read_deliveries, read_target
    from pipelines.storage.keys import CorpusKeys
    from pipelines.storage.manifest import Manifest
    from pipelines.storage.purging import Purged
    from pipelines.storage.query import sql
    from pipelines.storage.records import paragraphs
    from pipelines.storage.salts import SaltStore
    from pipelines.storage.suppression import SuppressionList
    from pipelines.storage.target import Target, load_target, open_confirm, split_target
    from pipelines.storage.tokens import (
        Tokenizer,
        check_tokens,
        load_tokenizer,
        train_tokenizer,
        training_texts,
        write_version_tokens,
    )
    from pipelines.storage.verification import Verified
    from pipelines.storage.versions import Versions

_HOME = {
    "archive": ("Archive", "Diff"),
    "config": ("Config", "default_text"),
    "demo": ("demo_config", "seed_demo"),
    "errors": (
        "ConfigError", "CorruptionError", "DemoError", "DiskFullError", "HomeError", "IntakeError", "KeysError",
        "QueryError", "SaltError", "StaleParentError", "StorageError", "TargetError", "TokenizerError",
        "UnknownVersionError", "VersionError",
    ),
    "home": ("Home",),
    "intake": ("Intake", "read_deliveries", "read_target"),
    "keys": ("CorpusKeys",),
    "manifest": ("Manifest",),
    "purging": ("Purged",),
    "query": ("sql",),
    "records": ("paragraphs",),
    "salts": ("SaltStore",),
    "suppression": ("SuppressionList",),
    "target": ("Target", "load_target", "open_confirm", "split_target"),
    "tokens": (
        "Tokenizer", "check_tokens", "load_tokenizer", "train_tokenizer", "training_texts", "write_version_tokens",
    ),
    "verification": ("Verified",),
    "versions": ("Versions",),
}  # fmt: skip
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Archive",
    "Config",
    "ConfigError",
    "CorpusKeys",
    "CorruptionError",
    "DemoError",
    "Diff",
    "DiskFullError",
    "Home",
    "HomeError",
    "Intake",
    "IntakeError",
    "KeysError",
    "Manifest",
    "Purged",
    "QueryError",
    "SaltError",
    "SaltStore",
    "StaleParentError",
    "StorageError",
    "SuppressionList",
    "Target",
    "TargetError",
    "Tokenizer",
    "TokenizerError",
    "UnknownVersionError",
    "Verified",
    "VersionError",
    "Versions",
    "check_tokens",
    "default_text",
    "demo_config",
    "load_target",
    "load_tokenizer",
    "open_confirm",
    "paragraphs",
    "read_deliveries",
    "read_target",
    "seed_demo",
    "split_target",
    "sql",
    "train_tokenizer",
    "training_texts",
    "write_version_tokens",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE[name]}"), name)


def __dir__() -> list[str]:
    """The public names."""
    return __all__
