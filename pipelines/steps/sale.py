"""What may be sold: records under an accepted licence whose owner consents to resale.

A sale is made where some buyer has a pool. Without one, values are measured of everything that may be trained on, and nobody is paid by them.

`consent_resell` of a record decides; where a delivery states none, the terms that were agreed with the owner: `[owners.NAME] resell`, else `[pricing]
resell`. A stated no is never overruled. These terms are read at the sale, not kept with records, so that an agreement of later needs no new delivery.
"""

from typing import TYPE_CHECKING, Any

from pipelines.storage.terms import AGREED

if TYPE_CHECKING:
    import polars as pl
    from numpy.typing import NDArray

    from pipelines.site import Site


def is_sale(site: "Site") -> bool:
    """Whether any buyer has a pool."""
    config = site.config
    return any(terms.pool_microunits is not None for terms in (config.pricing, *config.buyers.values()))  # fmt: skip


def accepted_licences(site: "Site") -> set[str]:
    """Licences under which a record may be sold: those of the configuration."""
    config = site.config
    return {
        *config.intake.licences,
        config.intake.text_licence,
        *(owner.licence for owner in config.owners.values()),
    } - {""}


def sale_inputs(site: "Site") -> dict[str, Any]:
    """What the choice of records depends on beside the records; owners only where one of them agreed to something."""
    inputs: dict[str, Any] = {"licences": sorted(accepted_licences(site))}
    if not is_sale(site):
        return inputs
    agreed = sorted(name for name, owner in site.config.owners.items() if owner.resell == AGREED)
    return inputs | {"resell": site.config.pricing.resell, **({"agreed": agreed} if agreed else {})}


def gate(
    site: "Site", frame: "pl.DataFrame", tokens_N: "NDArray[Any]"
) -> "tuple[NDArray[Any], dict[str, int]]":
    """Which records are valued, as they may be sold, and reason → records held back.

    Args:
        site: The open home.
        frame: `owner`, `licence`, `consent_train` and `consent_resell` of each live record.
        tokens_N: Tokens of each.

    Raises:
        PricingError: Nothing with a token may be sold; says how many records are held back by what, and what to do.
    """
    from valuation import for_sale
    from valuation.errors import PricingError

    consents = frame["consent_train"].to_list()
    if is_sale(site):
        owners = site.config.owners
        everybody = site.config.pricing.resell == AGREED
        agreed = {name for name, owner in owners.items() if owner.resell == AGREED}
        stated = zip(frame["consent_resell"].to_list(), frame["owner"].to_list(), strict=True)
        consents = [
            (everybody or owner in agreed) if flag is None else flag for flag, owner in stated
        ]
    sold_N, held_back = for_sale(frame["licence"].to_list(), consents, accepted_licences(site))
    if not (sold_N & (tokens_N > 0)).any():
        told = ", ".join(f"{count} by {reason}" for reason, count in held_back.items())
        raise PricingError(
            f"nothing may be sold: expected a record with a token, an accepted licence and consent to resale, got {len(frame)} records, held back: {told or 'none'}. "
            'Deliver the column consent_resell; or, where that was agreed with an owner, set resell = "agreed" under [owners.NAME] in dataworth.toml, with all '
            "of them under [pricing]; or take the pools out: then values are measured and nobody is paid"
        )
    return sold_N, held_back
