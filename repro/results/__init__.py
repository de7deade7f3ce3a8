"""Records: their types, metrics, the append-only store on disk, and the rule that selects the record that counts.

`launch` and `simulate` write records; `claims`, `accuracy` and `report` read them.
"""
