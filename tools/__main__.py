"""`python -m tools` is `adapterbus`."""

from tools.cli import main

main()
