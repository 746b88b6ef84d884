"""The routed experts: each token through the experts that it chose."""
