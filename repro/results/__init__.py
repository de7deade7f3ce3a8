"""The record as a type (`schema`, `parts`), its metrics under their names (`metrics`), records of what ranks measured
(`measured`, `kernels`), which record counts (`select`), the store on disk (`store`) and pandas views (`frames`).

`simulate` fills in records of simulated steps; it, `claims`, `launch`, `validate` and `report` import this.
"""
