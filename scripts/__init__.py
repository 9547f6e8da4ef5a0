"""The `draftsmith` command, quickstart and test scripts, benchmarks."""
