"""What can go wrong with a report.

```
ReportError (ValueError)   the facts handed over contradict each other or have the wrong form
```
"""


class ReportError(ValueError):
    """The data of a report is malformed or contradicts itself; the message names the field."""
