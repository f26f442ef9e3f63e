"""What each asset does with an open home, without Dagster: read, one call into a package, write.

A step returns `(data_version, values)`; `pipelines.resources` stores them, `pipelines.describe` shows them.
"""
