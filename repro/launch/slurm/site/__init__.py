"""A cluster: the profile that says how its SLURM is asked, and what its SLURM answers.

`repro.launch.slurm`'s other three packages and `repro.accuracy.calibrate` may import it; it imports none of them.
"""
