"""Result records: their types and metrics, the append-only store on disk, and the selection of one per experiment.

`launch` and `simulate` write records; `claims`, `accuracy` and `report` read them.
"""
