"""Text output of the `repro` commands. The commands of `cli` call these modules, which call the computing packages."""
