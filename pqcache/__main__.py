"""``python -m pqcache``."""

from pqcache.cli import main

main()
