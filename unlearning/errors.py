"""Errors of the package, one small tree.

::

    UnlearningError (ValueError)        bad input to a method or an audit; the message never quotes a record's text
    ├── PeopleError                     a file of people's records cannot be read, unsealed or understood
    ├── ProbeError                      no question can be made of a record with this tokenizer
    ├── PlanError                       an audit plan or a run's `extra` is incomplete, unknown or too lax
    ├── LineageError                    the models do not belong to the request, or not together
    └── RowsError                       rows and plan do not belong together

A verdict is never an error: FAIL, INCONCLUSIVE and INVALID are results and are returned.
"""

from __future__ import annotations


class UnlearningError(ValueError):
    """Input that a method or an audit refuses; the run ends with exit code 3."""


class PeopleError(UnlearningError):
    """A file of people's records that cannot be read, unsealed or understood."""


class ProbeError(UnlearningError):
    """A record of which no question can be made with the given tokenizer."""


class PlanError(UnlearningError):
    """An audit plan, or the `extra` part of a run, that is incomplete, unknown or too lax."""


class LineageError(UnlearningError):
    """Models that do not belong to the request or to each other: other data, another recipe, unknown to the ledger."""


class RowsError(UnlearningError):
    """Rows that do not belong to the plan they are judged with."""
