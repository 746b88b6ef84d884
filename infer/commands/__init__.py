"""The subcommands of `glm52` that generate."""
