"""One module per store: each implements ``base.Source``, and ``base.Target`` if it can be written."""
