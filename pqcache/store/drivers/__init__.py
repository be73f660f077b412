"""One module per store; each turns the store's own client into a ``Source``."""
