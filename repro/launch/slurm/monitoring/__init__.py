"""Monitoring of submissions: registry, states of cases, logs, cancellation, and collection of lost cases."""
