"""`glm52 selftest`: what a machine does, beside what it should: kernels, collectives, a tiny model, real widths."""
