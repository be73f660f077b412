"""One module a store; each implements ``base.Source``, and ``base.Target`` where it can write."""
