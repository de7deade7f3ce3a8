"""Weights in and out, and their evaluation by published protocols."""
