"""What commands print: one file a view, made of `repro.util`; imported by `repro.cli.commands` only."""
