"""The oracle of an epoch: its rows and their order, through every public way to read one.

What is expected comes from pyarrow.parquet alone, and complete rows are compared. ``golden.json`` has orders that no
version may change.
"""
