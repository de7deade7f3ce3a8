"""The real step in shape only, at any scale: memory, communication, time, and what fits.

`trace` records the step, `memory` and `time` say what the trace holds and how long it takes, `step` is all of it
for one experiment, `plan` searches layouts, `placement` puts ranks on nodes.  `launch`, `calibrate`, `validate`
and `cli` import it.
"""
