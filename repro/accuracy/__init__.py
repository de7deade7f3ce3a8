"""The accuracy of predictions: calibrated machines, scaled twins, and predictions against published values."""
