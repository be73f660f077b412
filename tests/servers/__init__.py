"""Stores for tests and benchmarks: a Hadoop HDFS, a Ceph S3 gateway, emulators of Google's and Azure's.

They listen on 127.0.0.1 only, on free ports, keep everything they own in one temporary directory, and die
with the process that started them, even when that one is killed with -9.

    from tests.servers import hdfs, s3

    with contextlib.closing(hdfs.start(directory)) as store:
        store.upload_tree(local_dir, store.url + "/data")

``python -m tests.servers.install`` installs what they need: Debian packages, Hadoop's jars, Azurite.
"""
