"""Run a suite: plan what the store lacks, start ranks, watch them, record how each experiment ended.

`run` is the command, `plan` says what is missing, `runner` runs it with a launcher (`local`, `slurm`), `supervise`
watches any launch, `recorder` writes what came of it; `simulated` traces instead.  `calibrate`, `report` and `cli`
import it.
"""
