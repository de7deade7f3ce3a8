"""Files of other frameworks for an experiment, and experiments from such files.

| module | content |
|---|---|
| `*.toml` | the options of each framework with their keys here, and what it cannot express |
| `table` | the table as an object that writes options and reads them back |
| `rules` | options that several keys determine |
| `files` | the formats of the files, and the scripts that launch them |
"""
