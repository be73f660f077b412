"""``pqcache demo``: sync, inspect, repartition and train on a dataset that it makes, with every claim checked."""
