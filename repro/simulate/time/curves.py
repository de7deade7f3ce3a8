"""What a step takes with other values of one unknown number, those outside of its range among them.

From it follows, without another trace, which value a published point would need
(`repro.accuracy.validate.implied`).  It takes as long as an interval again, and so only records have it.
"""

from __future__ import annotations

from dataclasses import replace

from repro.config.systems.unknowns import Case
from repro.simulate.time.interval import in_cases, rounded
from repro.simulate.time.predict import Prediction
from repro.simulate.time.uncertain import uncertain

MOVES = 0.01
"""Part of a step that an unknown moves at least whose curve is kept."""


def curved(prediction: Prediction) -> Prediction:
    """With the curves of the unknowns that move the step by more than `MOVES`."""
    interval = prediction.interval
    if interval is None:
        return prediction
    moving = {move.key for move in interval.moves if move.span > MOVES * min(move.low_s, move.high_s)}
    around = [
        (one.key, value, quantile)
        for one in uncertain(prediction.system, prediction.generation)
        if one.key in moving
        for value, quantile in one.around.items()
    ]
    if not around:
        return prediction
    cases = [Case(key, quantile) for key, _, quantile in around]
    taken = in_cases(prediction.experiment, prediction.system, prediction.roles, cases)
    curves: dict[str, list[list[float]]] = {key: [] for key in moving}
    for (key, value, _), seconds in zip(around, taken, strict=True):
        curves[key].append([rounded(value), rounded(seconds)])
    moves = [replace(move, curve=curves.get(move.key, move.curve)) for move in interval.moves]
    return replace(prediction, interval=replace(interval, moves=moves))
