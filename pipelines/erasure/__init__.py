"""Finishing an erasure: finding every copy and derivative of some records, removing it, and proving that nothing is left.

::

    batches      requests that share a sealed batch: what is to go, and whether its time has come
    needles      what a record looks like on disk: text in four spellings, token ids in three widths, its id
    search       every file of the home, decoded: gzip, zstd, Parquet, Arrow, NumPy, SQLite, raw bytes
    stores       the inventory of derivatives: each store, and how the records leave it
    deliveries   files of the inbox: the home's own are rewritten, a user's are listed
    finishing    the order of it all, with a journal, so that a killed process is carried on

A request is `shredded` only after a search of the whole home has found the records nowhere.
"""
