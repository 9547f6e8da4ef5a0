"""A file per subcommand of `draftsmith`: `add` declares its options, `run` calls the module that does the work."""
