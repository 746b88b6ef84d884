"""The router's choice: which experts a token takes, with what gates."""
