"""When everything of a step happens on a system: nothing in here is fitted to what it predicts.

`device` and `network` give seconds to operators and collectives, `program` and `stage` are one pipeline stage's step,
`schedule` couples the stages, `predict` is the whole; `calibration_points` are the published points that calibrate a
generation of software. `simulate.step`, `simulate.plan` and `validate` import it.
"""
