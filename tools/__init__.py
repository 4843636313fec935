"""The `adapterbus` command: everything that people run and look at."""
