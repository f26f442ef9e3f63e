"""`python -m pipelines.gate`: exits non-zero when any asset check failed or never ran.

Dagster's command exits 0 on a failed check that isn't blocking; continuous integration asks here instead.
"""

import sys

import dagster as dg


def failed_checks(instance: dg.DagsterInstance, definitions: dg.Definitions) -> list[str]:
    """One line per check whose latest result is not a pass.

    Args:
        instance: Where the runs are recorded.
        definitions: The code location whose checks must all have passed.
    """
    keys = sorted(definitions.resolve_asset_graph().asset_check_keys, key=str)
    latest = instance.event_log_storage.get_latest_asset_check_execution_by_key(keys)
    lines = []
    for key in keys:
        name = f"{key.asset_key.to_user_string()}:{key.name}"
        record = latest.get(key)
        event = record.event.dagster_event if record and record.event else None
        if record is None:
            lines.append(f"{name}: never ran")
        elif event is None or event.event_type_value != "ASSET_CHECK_EVALUATION":
            lines.append(f"{name}: {record.status.value.lower()}, no result")
        elif not event.asset_check_evaluation_data.passed:
            why = event.asset_check_evaluation_data.description or "no description"
            lines.append(f"{name}: failed, {why}")
    return lines


def main() -> int:
    """Print every check that did not pass; the exit code is 1 if there is one."""
    from pipelines.definitions import defs

    with dg.DagsterInstance.get() as instance:
        lines = failed_checks(instance, defs())
    for line in lines:
        sys.stdout.write(line + "\n")
    sys.stdout.write("gate: closed\n" if lines else "gate: every check passed\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
