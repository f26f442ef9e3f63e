"""When it runs: resources, executor, the nightly job, the inbox sensor; both are running by default."""

import dagster as dg

from pipelines.resources import resources
from pipelines.settings import read_settings

everything = dg.define_asset_job(
    "everything",
    selection=dg.AssetSelection.all(),
    description="The whole graph; unchanged parts are reused.",
)

nightly = dg.ScheduleDefinition(
    name="nightly", job=everything, cron_schedule="0 3 * * *", default_status=dg.DefaultScheduleStatus.RUNNING,
    description="Every night at three: intake, values, prices, receipts, audits.",
)  # fmt: skip


@dg.sensor(
    job=everything,
    minimum_interval_seconds=60,
    default_status=dg.DefaultSensorStatus.RUNNING,
    required_resource_keys={"home"},
)
def inbox(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
    """Starts a run when the content of the inbox is not what the last run saw."""
    from pipelines.arrivals import changed_content, listing

    site = context.resources.home.site()
    seen = listing(site.inbox)
    if seen == context.cursor:
        return dg.SkipReason("nothing new in the inbox")
    digest = changed_content(site)
    if digest is None:
        return dg.SensorResult(skip_reason="the last run saw this content", cursor=seen)
    return dg.SensorResult(run_requests=[dg.RunRequest(run_key=digest)], cursor=seen)


@dg.definitions
def automation() -> dg.Definitions:
    """Resources and the executor of this deployment, with job, schedule and sensor."""
    settings = read_settings()
    executor = (
        dg.in_process_executor if settings.executor == "in_process" else dg.multiprocess_executor
    )
    return dg.Definitions(
        resources=resources(settings),
        executor=executor,
        jobs=[everything],
        schedules=[nightly],
        sensors=[inbox],
    )
