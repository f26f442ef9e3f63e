"""A study of audits that fits on one core: made-up people, small models, every method and every attack.

::

    people      names, towns, jobs and six random digits from a seed; a word-level tokenizer
    profiles    smoke (under a minute) and pilot (a quarter of an hour): sizes and methods
    models      trains original, gold models and every method with the trainer's own loop, resumable
    audits      attacks every model once, and puts audits together from the rows
    assertions  A1 to A16: what such a study must show
    ripple      A11: whom forgetting one person hurts
    depth       A12: unlearning depth of the study's models
    coresets    a part of the forgotten people, or of their records, is pushed; coreset_measures: what that leaves of the others

`make accept STUDY=audit-pilot` runs the pilot. The people exist nowhere, so that their texts may be written to disk and their numbers may
be looked at.
"""

from __future__ import annotations
