"""`python -m glm52_jax` is the command `glm52`."""

from glm52_jax.cli import main

main()
