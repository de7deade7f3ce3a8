"""The report: one self-contained page of verdicts, evidence and figures, drawn from the store alone."""
