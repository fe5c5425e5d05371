"""An S3 server of this process, and the URL of an empty bucket."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.ports import free_port


@contextlib.contextmanager
def bucket() -> Iterator[str]:
    """A function's worth of `s3://...` URLs: `{bucket}` with the server in its query."""
    server_module = pytest.importorskip("moto.server")
    port = free_port()
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    try:
        import pyarrow.fs

        address = f"127.0.0.1:{port}"
        filesystem = pyarrow.fs.S3FileSystem(
            access_key="key", secret_key="secret", region="us-east-1", scheme="http",
            endpoint_override=address, allow_bucket_creation=True,
        )  # fmt: skip
        filesystem.create_dir("bucket")
        yield f"s3://key:secret@bucket?region=us-east-1&scheme=http&endpoint_override={address}"
    finally:
        server.stop()
