"""The demo: `adapterbus demo`."""
