"""A seeded simulation of the bus: the real minds, journal and codec on a virtual clock, under injected faults."""
