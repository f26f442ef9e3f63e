"""Resources of the code location: the home, and the client that starts trainer runs.

One table for every deployment: `resources()` below. An asset asks for `home` and `pipes`, and never knows where it runs.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from pipelines import preloaded
from pipelines.results import Result, input_key, reuse_or_make
from pipelines.settings import Settings, read_settings

if TYPE_CHECKING:
    from pipelines.site import Site


class HomeResource(dg.ConfigurableResource):
    """The home folder: everything a run reads and makes."""

    path: str
    """Absolute path of the home."""
    inbox: str = ""
    """The user's own inbox; empty for the home's."""
    size: str = ""
    """Size that overrides the configured one; empty for none."""
    world: str = ""
    """Number or layout of trainer processes that overrides the configured one; empty for none."""

    def site(self) -> "Site":
        """Open the home (made on first use), read `dataworth.toml`, resolve the size."""
        from pipelines.site import open_site

        return open_site(Path(self.path), self.inbox or None, self.size or None, self.world or None)

    def materialize(
        self,
        context: dg.AssetExecutionContext,
        inputs: Mapping[str, Any],
        make: Callable[[], tuple[str, Mapping[str, Any]]],
        describe: Callable[[Result], Mapping[str, Any]],
    ) -> dg.MaterializeResult:
        """Reuse or make an asset's result and hand it to Dagster with its metadata.

        Args:
            context: The asset's execution context.
            inputs: Everything the result depends on besides the code version.
            make: Does the work; returns data version and values.
            describe: Turns the result into UI metadata.
        """
        name = context.asset_key.to_user_string()
        version = context.assets_def.code_versions_by_key[context.asset_key] or ""
        home = self.site().home
        key = input_key(name, version, inputs)

        def work() -> tuple[str, Mapping[str, Any]]:
            preloaded.begin()  # something changed: a trainer will be wanted, and imports while we work
            return make()

        with home.lock(f"asset-{name}"):
            result = reuse_or_make(home.results, home.path, name, key, work)
        context.log.info(
            f"{name}: {'nothing changed, reused' if result.reused else 'made'} {result.data_version[:12]}"
        )
        metadata = {**describe(result), "reused": result.reused, "key": result.key[:16]}
        return dg.MaterializeResult(
            value=result, data_version=dg.DataVersion(result.data_version), metadata=metadata
        )


def resources(settings: Settings | None = None) -> dict[str, Any]:
    """Resources of this deployment, from the environment."""
    from pipelines.io_managers import ResultIOManager

    settings = settings or read_settings()
    home = HomeResource(
        path=str(settings.home),
        inbox=str(settings.inbox or ""),
        size=settings.size or "",
        world=settings.world or "",
    )
    return {
        "home": home,
        "io_manager": ResultIOManager(home=home),
        "pipes": dg.PipesSubprocessClient(termination_timeout_seconds=60),
    }
