"""The machine as data: facts, the probe, machine descriptions and the memory estimate."""
