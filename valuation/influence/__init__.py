"""Which training records raise or lower the loss of which queries: one file per method, one signature.

    scores(model, train, queries, *, ...) -> Scores        scores_QN > 0: training on n lowers q's loss

Everything is a bilinear form of gradients, ``score(q, n) = <H^-1 g_q, g_n>``; the methods differ in H.
README.md of `valuation` has the table. Names load lazily (PEP 562): importing is free.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from valuation.influence.scores import Binding, Scores, TokenSet, bind

_HOME = {"scores": ("Binding", "Scores", "TokenSet", "bind")}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = ["Binding", "Scores", "TokenSet", "bind"]


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use."""
    if name not in _MODULE:
        raise AttributeError(f"module 'valuation.influence' has no attribute {name!r}")
    value = getattr(import_module(f"valuation.influence.{_MODULE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Public names."""
    return list(__all__)
