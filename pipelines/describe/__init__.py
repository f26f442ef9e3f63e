"""UI metadata of every asset, one module per group: short tables, charts, well-known keys; never a record's text."""
