"""From a suite to job arrays: which cases go (`intent`), how they share jobs (`pack`), what sbatch gets (`script`).

`check` and `doctor` say what of a profile the cluster cannot do, before anything is submitted; `dryrun` shows what
would be; `errand` waits for a job of its own.  It imports the other three packages; none of them imports it.
"""
