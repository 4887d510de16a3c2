"""The report page of a run: one file with every answer."""
