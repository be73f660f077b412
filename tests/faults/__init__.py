"""Tests that try to break a sync: a bad network, kill -9, full disks, moving sources, power loss.

``PQCACHE_FAULTS=500`` sweeps deeper than CI does: that many instants for each sweep, 0 means every one.
"""
