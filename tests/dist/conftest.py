"""The S3 server of the tests."""

from s3 import bucket, proxy, s3_server

__all__ = ["bucket", "proxy", "s3_server"]
