"""One file per subcommand of `atoll`."""
