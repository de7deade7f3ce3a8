"""What commands print: one file a view, made of `repro.render`; imported by `repro.cli.commands` only."""
