"""When it runs and where it lands: storage, Dagster assets, checks, schedules, reports and commands."""
