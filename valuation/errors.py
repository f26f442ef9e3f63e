"""The errors of this package, one small tree.

::

    ValuationError (ValueError)
    ├── TokensError      flat token arrays, offsets, folds or byte counts disagree
    ├── ClusterError     fingerprints, texts or a threshold can't be clustered
    ├── GroupError       owners can't be cut into the groups asked for
    ├── UtilityError     a coalition table is incomplete, of the wrong shape or not finite
    ├── ResultError      a value is not finite or doesn't fit its integer column
    ├── PricingError     values, clusters and groups don't make one consistent price list
    ├── GradientError    gradients were asked of a model or batch that can't give them
    ├── EvaluationError  values and the retrainings they are held against don't fit together
    ├── HeldOutError     records that values are measured on stand in the training data
    └── ProxyError       a proxy training was given a setting or a bank it can't use

All of them are bad input, so all of them are ``ValueError``. Every message says what was
expected, what was got, and what to do.
"""

from __future__ import annotations


class ValuationError(ValueError):
    """Any input that this package refuses."""


class TokensError(ValuationError):
    """Flat token arrays, offsets, folds or byte counts disagree."""


class ClusterError(ValuationError):
    """Fingerprints, texts or a threshold can't be clustered."""


class GroupError(ValuationError):
    """Owners can't be cut into the groups asked for."""


class UtilityError(ValuationError):
    """A coalition table is incomplete, of the wrong shape or not finite."""


class ResultError(ValuationError):
    """A value is not finite or doesn't fit its integer column."""


class PricingError(ValuationError):
    """Values, clusters and groups don't make one consistent price list."""


class GradientError(ValuationError):
    """Gradients were asked of a model or a batch that can't give them."""


class ProxyError(ValuationError):
    """A proxy training was given a setting or a bank of coalitions it can't use."""


class EvaluationError(ValuationError):
    """Values and the retrainings they are held against don't fit together."""


class HeldOutError(ValuationError):
    """Records that values are measured on stand in the training data."""
