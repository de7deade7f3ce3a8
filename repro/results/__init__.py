"""Records: the type (`schema`), metrics and their names (`metrics`), which record counts (`select`), the store on disk
(`store`), pandas views (`frames`).

`simulate`, `claims`, `launch`, `validate` and `report` import it.
"""
