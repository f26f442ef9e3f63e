"""IO manager: assets pass `Result`s, small records of what lies in the home; the data itself never goes through Dagster."""

import dagster as dg

from pipelines.resources import HomeResource
from pipelines.results import Result, latest


class ResultIOManager(dg.ConfigurableIOManager):
    """Hands the newest `Result` of an asset to those downstream."""

    home: dg.ResourceDependency[HomeResource]

    def handle_output(self, context: dg.OutputContext, obj: Result) -> None:
        """A result was stored by the asset itself, under its lock; only its kind is checked here."""
        if not isinstance(obj, Result):
            msg = f"{context.asset_key.to_user_string()} returned {type(obj).__name__}; expected a Result"
            raise TypeError(msg)

    def load_input(self, context: dg.InputContext) -> Result:
        """The newest result of the upstream asset.

        Raises:
            LookupError: It was never materialised in this home.
        """
        name = context.asset_key.to_user_string()
        result = latest(self.home.site().home.results, name)
        if result is None:
            msg = (
                f"asset {name} has no result in this home yet; materialise it first: dataworth run"
            )
            raise LookupError(msg)
        return result
