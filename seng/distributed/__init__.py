"""Which ranks share what."""
